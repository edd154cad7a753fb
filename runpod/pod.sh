#!/usr/bin/env bash
# Functions and variables of the other scripts, which source this file. It does nothing by itself.
# A shell without the variables of the container's start (RunPod's own, HF_TOKEN, WANDB_API_KEY, POD_HOURS), such as a shell
# of ssh, gets them from process 1.

# shellcheck disable=SC2034  # the names are for the scripts that source this file
usage() { # print the comment at the top of the script
  local line
  while IFS= read -r line && [[ $line == "#"* ]]; do
    line=${line#\#}
    [[ $line == "!"* ]] || echo "${line# }"
  done <"$0"
}
mistake() { echo "error: $1; see bash $0 --help" >&2; exit 2; }

for word in "$@"; do
  [[ $word != -- ]] || break # the options of a command follow
  case $word in -h | --help) usage; exit 0 ;; esac
done
case ${0##*/} in pod.sh | environment.sh) mistake "$0 is only sourced by the other scripts" ;; esac
trap '' PIPE # a reader of the output may end first

workspace=${WORKSPACE:-${RP_WORKSPACE:-/workspace}}
temporary=${TMPDIR:-/tmp}
run_lock=$temporary/run_and_stop.lock # holds the number of the run_and_stop.sh that runs

# A full disk or a terminal that has gone must not end what says something.
say() { { echo "$(date -u +%FT%TZ) $*"; } 2>/dev/null || :; }

is_positive() { [[ $1 =~ ^([0-9]{1,6}\.?[0-9]*|\.[0-9]+)$ && $1 =~ [1-9] ]]; }

# NUMBER UNIT: their product, rounded; bash counts in integers, and awk may be missing.
seconds() {
  local whole=${1%%.*} part=000000
  [[ $1 == *.* ]] && part=${1#*.}000000
  echo "$((((10#${whole:-0} * 1000000 + 10#${part:0:6}) * $2 + 500000) / 1000000))"
}

# COMMAND…: print it with an option on each line, to be copied into a shell.
show_command() {
  local word quote="'\\''"
  for word in "$@"; do
    [[ $word != --* ]] || printf '\\\n  '
    [[ $word =~ ^[A-Za-z0-9_./:=@%+-]+$ ]] || word="'${word//\'/$quote}'"
    printf '%s ' "$word"
  done
  echo
}

# SECONDS: no less where `sleep` is missing or was killed.
rest() {
  local end=$((SECONDS + $1))
  sleep "$1" 2>/dev/null && return
  while ((SECONDS < end)); do read -rt 1 <> <(:) 2>/dev/null || :; done
}

# PROCESS WORDS: whether that process was started with these words. Its number alone may be another's by now.
is_running() {
  local words=()
  [[ $1 =~ ^[0-9]+$ ]] && { mapfile -d '' words <"/proc/$1/cmdline"; } 2>/dev/null
  [[ ${words[*]-} == *"$2"* ]]
}

# NAME: where a log of this name can be written, on the volume if it may be.
log_file() {
  local folder
  for folder in "$workspace/logs" "$temporary"; do
    { mkdir -p "$folder" && : >>"$folder/$1"; } 2>/dev/null && { echo "$folder/$1"; return; }
  done
  echo /dev/null
}

fetch_start_variables() {
  local setting name
  while IFS= read -r -d '' setting; do
    name=${setting%%=*}
    [[ $name =~ ^(RUNPOD_[A-Z0-9_]+|HF_TOKEN|WANDB_API_KEY|POD_HOURS)$ && -z ${!name:-} ]] && export "${setting?}"
  done
}
if [[ -z ${RUNPOD_POD_ID:-} ]]; then
  { fetch_start_variables <"${INIT_ENVIRON:-/proc/1/environ}"; } 2>/dev/null || :
fi
