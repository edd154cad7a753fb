#!/usr/bin/env bash
# The command that rents a pod; it is only printed, and typed for you with --yes.
#   bash runpod/create_pod.sh --gpu "NVIDIA A100-SXM4-80GB" --n 8 --volume VOLUME_ID --hours 4
#   bash runpod/create_pod.sh --cpu --volume VOLUME_ID              a machine without cards, for preparing the data
#   --image IMAGE   (runpod/pytorch:1.0.7-cu1281-torch291-ubuntu2404)
#   --name NAME     (gpt2)
#   --yes           rent it now: from here on it costs money
# Secrets are named, not typed: HF_TOKEN and WANDB_API_KEY come from RunPod's secrets of these names.
set -euo pipefail

mistake() { echo "error: $1; see the head of runpod/create_pod.sh" >&2; exit 2; }

gpu="" n=1 volume="" hours="" image=runpod/pytorch:1.0.7-cu1281-torch291-ubuntu2404 name=gpt2 yes=0 cpu=0
while (($#)); do
  case $1 in
    --gpu) gpu=${2:-}; shift ;;
    --n) n=${2:-}; shift ;;
    --volume) volume=${2:-}; shift ;;
    --hours) hours=${2:-}; shift ;;
    --image) image=${2:-}; shift ;;
    --name) name=${2:-}; shift ;;
    --cpu) cpu=1 ;;
    --yes) yes=1 ;;
    *) mistake "there is no option $1" ;;
  esac
  shift || mistake "an option needs its value"
done
if ((!cpu)); then
  [[ -n $gpu ]] || mistake "--gpu CARD or --cpu is needed"
  [[ -n $hours ]] || mistake "--hours H is needed: the deadline that the pod arms when it starts"
fi

command=(runpodctl pod create --name "$name" --image "$image" --container-disk-in-gb 60)
if ((cpu)); then command+=(--compute-type cpu); else command+=(--gpu-id "$gpu" --gpu-count "$n" --min-cuda-version 12.8); fi
[[ -n $volume ]] && command+=(--network-volume-id "$volume" --volume-mount-path /workspace)
settings="{\"HF_TOKEN\":\"{{ RUNPOD_SECRET_HF_TOKEN }}\",\"WANDB_API_KEY\":\"{{ RUNPOD_SECRET_WANDB_API_KEY }}\""
[[ -n $hours ]] && settings+=",\"POD_HOURS\":\"$hours\""
command+=(--env "$settings}" --docker-args "bash -c 'bash /workspace/gpt2/runpod/on_start.sh & exec /start.sh'")

printf '%q ' "${command[@]}"
echo
if ((yes)); then
  "${command[@]}"
else
  echo "nothing was rented: type --yes to do so" >&2
fi
