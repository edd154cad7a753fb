#!/usr/bin/env bash
# The command that rents a pod; it is only printed, and typed for you with --yes.
#   bash runpod/create_pod.sh --gpu "NVIDIA A100-SXM4-80GB" --n 8 --volume VOLUME_ID --hours 4
#   bash runpod/create_pod.sh --cpu --volume VOLUME_ID --hours 8    a machine without cards, for preparing the data
#   --volume ID         a network volume, which outlives the pod; secure cloud in its data centre only
#   --volume_gb N       instead: a disk of the pod itself, on a community machine; it stays when the pod is stopped and GOES
#                       WITH THE POD when it is terminated
#   --hours H           the deadline that the pod arms at every start
#   --auto_run COMMAND  what the pod runs by itself once it is set up; the repository must be on the volume already
#   --image IMAGE       (runpod/pytorch:1.0.7-cu1281-torch291-ubuntu2404)
#   --name NAME         (gpt2)
#   --yes               rent it now: from here on it costs money
# Secrets are named, not typed: HF_TOKEN and WANDB_API_KEY come from RunPod's secrets of these names. Where the volume has no
# repository at /workspace/gpt2 yet, the start command keeps the deadline itself.
set -euo pipefail
# shellcheck source=runpod/pod.sh
. "$(dirname "${BASH_SOURCE[0]}")/pod.sh"

mistake() { echo "error: $1; see the head of runpod/create_pod.sh" >&2; exit 2; }
json() { # TEXT: as JSON writes it
  local text=${1//\\/\\\\}
  text=${text//\"/\\\"} text=${text//$'\n'/\\n}
  printf '"%s"' "${text//$'\t'/\\t}"
}

gpu="" n=1 volume="" volume_gb="" hours="" auto_run="" image=runpod/pytorch:1.0.7-cu1281-torch291-ubuntu2404 name=gpt2 yes=0 cpu=0
while (($#)); do
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
    --yes) yes=1 ;;
    *) mistake "there is no option $1" ;;
  esac
  shift || mistake "an option needs its value"
done
if ((cpu)); then [[ -z $gpu ]] || mistake "--gpu or --cpu, not both"; else [[ -n $gpu ]] || mistake "--gpu CARD or --cpu is needed"; fi
[[ $n =~ ^[1-9][0-9]*$ ]] || mistake "--n wants a number of cards, not '$n'"
is_positive "$hours" || mistake "--hours H is needed, a number: the deadline that the pod arms when it starts"
if [[ -n $volume_gb ]]; then
  [[ -z $volume ]] || mistake "--volume or --volume_gb, not both"
  [[ $volume_gb =~ ^[1-9][0-9]*$ ]] || mistake "--volume_gb wants a number of GB, not '$volume_gb'"
  ((!cpu)) || mistake "a CPU pod has no disk of its own that is kept: type --volume ID"
elif [[ -z $volume ]]; then
  mistake "--volume ID or --volume_gb N is needed: without a volume a stop loses the run"
fi

command=(runpodctl pod create --name "$name" --image "$image" --container-disk-in-gb 60 --volume-mount-path /workspace)
if ((cpu)); then command+=(--compute-type cpu); else command+=(--gpu-id "$gpu" --gpu-count "$n" --min-cuda-version 12.8); fi
ways='"pod stop" "stop pod"' # both grammars of runpodctl
if [[ -n $volume ]]; then
  command+=(--network-volume-id "$volume")
  ways+=' "pod delete" "remove pod"'
else
  command+=(--volume-in-gb "$volume_gb" --cloud-type COMMUNITY)
fi
settings="{\"HF_TOKEN\":\"{{ RUNPOD_SECRET_HF_TOKEN }}\",\"WANDB_API_KEY\":\"{{ RUNPOD_SECRET_WANDB_API_KEY }}\",\"POD_HOURS\":\"$hours\""
[[ -n $auto_run ]] && settings+=",\"AUTO_RUN\":$(json "$auto_run")"
# In the single quotes of the start command; what is escaped is for the pod's shell.
sleeper="sleep $(seconds "$hours" 3600) && while :; do for way in $ways; do timeout 60 runpodctl \$way \$RUNPOD_POD_ID; sleep 60; done; done"
start="script=/workspace/gpt2/runpod/on_start.sh; if [ -f \$script ]; then bash \$script; else $sleeper; fi & exec /start.sh"
command+=(--env "$settings}" --docker-args "bash -c '$start'")

printf '%q ' "${command[@]}"
echo
if ((yes)); then
  "${command[@]}"
else
  echo "nothing was rented: type --yes to do so" >&2
fi
