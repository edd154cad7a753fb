#!/usr/bin/env bash
# Functions and variables for the other scripts. Only to be sourced.
# A shell opened by ssh lacks the environment variables of the container (RUNPOD_*, HF_TOKEN, WANDB_API_KEY,
# POD_HOURS). They are copied from process 1.

# shellcheck disable=SC2034  # the variables are used by the scripts that source this file
usage() { # print the comment at the top of the script as help text
  local line
  while IFS= read -r line && [[ $line == "#"* ]]; do
    line=${line#\#}
    [[ $line == "!"* ]] || echo "${line# }"
  done <"$0"
}
needs() { command -v "$1" >/dev/null || mistake "$1 is not installed. $2."; }
mistake() { echo "error: $1 See bash $0 --help." >&2; exit 2; }

for word in "$@"; do
  [[ $word != -- ]] || break # the words after -- are a command with its own options
  case $word in -h | --help) usage; exit 0 ;; esac
done
trap '' PIPE # continue if the reader of the output ends first

workspace=${WORKSPACE:-${RP_WORKSPACE:-/workspace}}
temporary=${TMPDIR:-/tmp}
run_lock=$temporary/run_and_stop.lock # contains the process id of the running run_and_stop.sh

# Print a line with the time. A full disk or a closed terminal must not end the script.
say() { { echo "$(date -u +%FT%TZ) $*"; } 2>/dev/null || :; }

is_positive() { [[ $1 =~ ^([0-9]{1,6}\.?[0-9]*|\.[0-9]+)$ && $1 =~ [1-9] ]]; }

# NUMBER UNIT: print their rounded product. bash has only integers, and awk may be missing.
seconds() {
  local whole=${1%%.*} part=000000
  [[ $1 == *.* ]] && part=${1#*.}000000
  echo "$((((10#${whole:-0} * 1000000 + 10#${part:0:6}) * $2 + 500000) / 1000000))"
}

# COMMAND…: print the command with one option per line, ready to be copied into a shell.
show_command() {
  local word quote="'\\''"
  for word in "$@"; do
    [[ $word != --* ]] || printf '\\\n  '
    [[ $word =~ ^[A-Za-z0-9_./:=@%+-]+$ ]] || word="'${word//\'/$quote}'"
    printf '%s ' "$word"
  done
  echo
}

# SECONDS: wait for at least this long, even if `sleep` is missing or was killed.
rest() {
  local end=$((SECONDS + $1))
  sleep "$1" 2>/dev/null && return
  while ((SECONDS < end)); do read -rt 1 <> <(:) 2>/dev/null || :; done
}

# PROCESS WORDS: succeed if the command line of the process contains these words. A process id alone is not enough,
# because another process may have the same id by now.
is_running() {
  local words=()
  [[ $1 =~ ^[0-9]+$ ]] && { mapfile -d '' words <"/proc/$1/cmdline"; } 2>/dev/null
  [[ ${words[*]-} == *"$2"* ]]
}

# NAME: print the path for a log file with this name, on the volume if that is writable.
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
