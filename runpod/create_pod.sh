#!/usr/bin/env bash
# Print the command that rents a pod, and the cost. With --yes, run the command.
#   bash runpod/create_pod.sh --gpu "A100 SXM 80 GB" --n 8 --volume VOLUME_ID --hours 4
#   bash runpod/create_pod.sh --gpu 4090 --volume_gb 80 --hours 30  one cheap card, without a network volume
#   bash runpod/create_pod.sh --cpu --volume VOLUME_ID --hours 8    a machine without a GPU, to prepare the data
#
#   --gpu NAME          the GPU, such as 4090, A6000 or "H100 SXM", or RunPod's id, such as "NVIDIA GeForce RTX 3080"
#   --n N               number of GPUs (default: 1)
#   --cpu               rent a pod without a GPU
#   --volume ID         attach this network volume. It is kept when the pod is terminated. Works only in the data
#                       centre of the volume, in the secure cloud
#   --volume_gb N       instead of --volume: rent a community machine with a disk of N GB. The disk is kept when the
#                       pod is stopped. It is LOST when the pod is terminated
#   --hours H           stop the pod H hours after each start (its deadline). At most 720
#   --allow_long        accept a value above 720 for --hours
#   --auto_run COMMAND  run this command when the pod is set up. The volume must contain the repository
#   --image IMAGE       container image (default: runpod/pytorch:1.0.7-cu1281-torch291-ubuntu2404)
#   --name NAME         name of the pod (default: gpt2)
#   --yes               rent the pod now. This costs money
#
# HF_TOKEN and WANDB_API_KEY are taken from the RunPod secrets with these names. If the volume does not contain the
# repository at /workspace/gpt2 yet, the start command of the pod stops the pod at the deadline.
set -euo pipefail
# shellcheck source=runpod/pod.sh
. "$(dirname "${BASH_SOURCE[0]}")/pod.sh"
repository=$(dirname "${BASH_SOURCE[0]}")/..

json() { # TEXT: print it as a JSON string
  local text=${1//\\/\\\\}
  text=${text//\"/\\\"} text=${text//$'\n'/\\n}
  printf '"%s"' "${text//$'\t'/\\t}"
}

gpu="" n=1 volume="" volume_gb="" hours="" auto_run="" image=runpod/pytorch:1.0.7-cu1281-torch291-ubuntu2404 name=gpt2
yes=0 cpu=0 long=0
while (($#)); do
  option=$1
  case $1 in
    --gpu) gpu=${2:-}; shift ;;
    --n) n=${2:-}; shift ;;
    --volume) volume=${2:-}; shift ;;
    --volume_gb) volume_gb=${2:-}; shift ;;
    --hours) hours=${2:-}; shift ;;
    --auto_run) auto_run=${2:-}; shift ;;
    --image) image=${2:-}; shift ;;
    --name) name=${2:-}; shift ;;
    --cpu) cpu=1 ;;
    --allow_long) long=1 ;;
    --yes) yes=1 ;;
    *) mistake "Unknown option '$1'." ;;
  esac
  shift || mistake "$option needs a value."
done
if ((cpu)); then [[ -z $gpu ]] || mistake "Pass --gpu or --cpu, not both."; else [[ -n $gpu ]] || mistake "Pass --gpu NAME or --cpu."; fi
[[ $n =~ ^[1-9][0-9]?$ ]] || mistake "--n is '$n'. Pass a number of GPUs such as 8."
is_positive "$hours" || mistake "--hours is '$hours'. Pass the number of hours after which the pod is stopped."
((long || $(seconds "$hours" 3600) <= 720 * 3600)) ||
  mistake "--hours $hours is more than 720 hours (30 days). Pass fewer hours, or --allow_long."
if [[ -n $volume_gb ]]; then
  [[ -z $volume ]] || mistake "Pass --volume or --volume_gb, not both."
  [[ $volume_gb =~ ^[1-9][0-9]*$ ]] || mistake "--volume_gb is '$volume_gb'. Pass a number of GB such as 50."
  ((!cpu)) || mistake "The disk of a CPU pod is lost when the pod stops. Pass --volume ID."
  cloud=community storage="a disk of $volume_gb GB"
elif [[ -n $volume ]]; then
  cloud=secure storage="the network volume $volume"
else
  mistake "Pass --volume ID or --volume_gb N. Without a volume the run is lost when the pod stops."
fi

# Replace a short name in $gpu by RunPod's id (docs.runpod.io/references/gpu-types).
resolve_gpu() {
  local line card name words word known="" found="" id="" count=0 prices
  prices=$(<"$tables/gpu_prices.yaml")
  shopt -s nocasematch
  while IFS= read -r line; do
    [[ $line =~ ^-\ \{card:\ ([^,]+),\ name:\ ([^,]+), ]] || continue
    card=${BASH_REMATCH[1]} name=${BASH_REMATCH[2]}
    [[ $prices == *"card: $card, provider: RunPod"* ]] || continue
    known+=", $card" words=" NVIDIA GeForce $card ${card// /} $name ${name//-/ } ${card//RTX A/A} "
    for word in $gpu; do [[ $words == *" $word "* ]] || continue 2; done
    count=$((count + 1)) found+="${found:+, }$card" id="NVIDIA $name"
    [[ $name != RTX\ [0-9]* ]] || id="NVIDIA GeForce $name"
    [[ $name != "RTX PRO 6000" ]] || id+=" Blackwell Server Edition"
  done <"$tables/cards.yaml"
  shopt -u nocasematch
  ((count == 1)) || mistake "--gpu $gpu matches ${found:-no card}. Pass one of: ${known#, }; or RunPod's id of another GPU."
  gpu=$id
}
tables=$repository/gpt2_repro/planning
((cpu)) || [[ $gpu == NVIDIA\ * ]] || resolve_gpu

# Print the list price of $gpu per hour and the date of the price, if gpu_prices.yaml contains them.
list_price() {
  local line card=""
  while IFS= read -r line; do
    [[ $line =~ ^-\ \{card:\ ([^,]+),\ name:\ ([^,]+), ]] || continue
    [[ " ${gpu//-/ } " == *" ${BASH_REMATCH[2]//-/ } "* ]] && card=${BASH_REMATCH[1]} && break
  done <"$tables/cards.yaml"
  while IFS= read -r line; do
    [[ $line =~ card:\ "$card",\ provider:\ RunPod\ $cloud,\ usd_per_hour:\ ([0-9.]+),\ date:\ ([0-9-]+) ]] || continue
    echo "${BASH_REMATCH[1]} ${BASH_REMATCH[2]}"
    return
  done <"$tables/gpu_prices.yaml"
}

command=(runpodctl pod create --name "$name" --image "$image" --container-disk-in-gb 60 --volume-mount-path /workspace
  --ports 22/tcp) # without it, rsync and tar over ssh cannot reach the pod
if ((cpu)); then command+=(--compute-type cpu); else command+=(--gpu-id "$gpu" --gpu-count "$n" --min-cuda-version 12.8); fi
ways='"pod stop" "stop pod"' # the new and the old syntax of runpodctl
if [[ -n $volume ]]; then
  command+=(--network-volume-id "$volume")
  ways+=' "pod delete" "remove pod"'
else
  command+=(--volume-in-gb "$volume_gb" --cloud-type COMMUNITY)
fi
settings="{\"HF_TOKEN\":\"{{ RUNPOD_SECRET_HF_TOKEN }}\",\"WANDB_API_KEY\":\"{{ RUNPOD_SECRET_WANDB_API_KEY }}\",\"POD_HOURS\":\"$hours\""
[[ -n $auto_run ]] && settings+=",\"AUTO_RUN\":$(json "$auto_run")"
# This text is inside the single quotes of the start command. Escaped variables are expanded by the pod's shell.
sleeper="sleep $(seconds "$hours" 3600) && while :; do for way in $ways; do timeout 60 runpodctl \$way \$RUNPOD_POD_ID; sleep 60; done; done"
start="script=/workspace/gpt2/runpod/on_start.sh; if [ -f \$script ]; then bash \$script; else $sleeper; fi & exec /start.sh"
command+=(--env "$settings}" --docker-args "bash -c '$start'")

{
  if ((cpu)); then machine="CPU only"; else machine="$n x $gpu"; fi
  echo "Machine:  $machine, $cloud cloud, $storage"
  echo "Image:    $image"
  echo "Deadline: $hours hours after each start"
  [[ -z $auto_run ]] || echo "Runs:     $auto_run"
  read -r price date < <(list_price) || price="" # no price, for example for a pod without a GPU
  if [[ -n $price ]]; then
    cents=$(seconds "$hours" "$((n * $(seconds "$price" 100)))")
    printf 'Cost:     at most $%d.%02d = %s hours x $%s x %d GPUs, without storage (list price of %s)\n' \
      "$((cents / 100))" "$((cents % 100))" "$hours" "$price" "$n" "$date"
  else
    echo "Cost:     unknown, because gpu_prices.yaml has no price for this machine. See https://www.runpod.io/pricing"
  fi
} >&2
show_command "${command[@]}"
if ((yes)); then
  needs runpodctl "Install it as described in https://github.com/runpod/runpodctl"
  "${command[@]}"
else
  echo "Nothing was rented. Pass --yes to rent this pod." >&2
fi
