#!/usr/bin/env bash
# Run the two commands of README.md on a newly installed system, as root and as an ordinary user.
#   sudo bash dev/fresh_machine.sh debian-12|debian-13|ubuntu-24.04 [COMMAND]
#
# The script installs the distribution into a new folder, then the packages that README.md names, clones the current
# commit, and runs `make demo` and `make test`, or COMMAND, in the clone. It prints exit code, time and disk space of
# each step, and exits with 1 if one failed. The mounts are in their own namespace and vanish with it. The folder is
# deleted at the end.
#
# It needs root, debootstrap, git and up to 20 GB of disk. Environment variables of pip, uv, proxies and certificates
# are passed on, and the files and folders that they name are mounted read-only. Further variables:
#   ACCOUNTS="root"      run as root only (default: "root tester")
#   FOLDER=DIR           install in DIR (default: a new folder in /var/tmp)
#   MIRROR=URL           use this mirror of the distribution
#   MOUNT="DIR …"        mount these folders read-only, for example local wheels
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
passed_on='^(PIP_|UV_|SSL_CERT_|REQUESTS_CA_|[a-z]+_proxy=|[A-Z]+_PROXY=)'

mistake() {
  echo "$1" >&2
  exit 2
}

packages_of_readme() {
  local command
  command=$(grep -o -m 1 'apt-get install [a-z0-9 +.-]*' "$repository/README.md" | head -n 1)
  echo "${command#apt-get install }"
}

# --- In the namespaces: $root is the new system ----------------------------------------------------------------------

# Mount a file or folder at its path in the new system, read-only.
mount_from_host() {
  local path=$1
  if [[ -d $path ]]; then
    mkdir -p "$root$path"
  else
    mkdir -p "$root$(dirname "$path")"
    touch "$root$path"
  fi
  mount --bind "$path" "$root$path"
  mount -o remount,bind,ro "$root$path"
}

mount_system() {
  local device
  mount -t proc proc "$root/proc"
  mount -t tmpfs tmpfs "$root/dev"
  for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
  done
  ln -s /proc/self/fd "$root/dev/fd"
  mkdir "$root/dev/shm" "$root/dev/pts"
  mount -t tmpfs tmpfs "$root/dev/shm"
  mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
  ln -s pts/ptmx "$root/dev/ptmx"
  cat /etc/resolv.conf >"$root/etc/resolv.conf"
  cat /etc/hosts >"$root/etc/hosts"
}

mount_settings() {
  local setting path
  for path in ${MOUNT:-}; do
    mount_from_host "$path"
  done
  for setting in "${settings[@]}"; do
    path=${setting#*=}
    # A file may be in a folder that is already mounted.
    if [[ $path == /* && -e $path && ! $path -ef $root$path ]]; then mount_from_host "$path"; fi
  done
}

# Run a command in the new system as a user, in the user's home or the folder that was cloned there.
run_as() {
  local user=$1 folder=$2
  shift 2
  # shellcheck disable=SC2016 # the inner shell expands the variables
  chroot --userspec="$user:$user" "$root" env -i "${settings[@]}" HOME="$(home_of "$user")" USER="$user" TERM=dumb \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin bash -c 'cd "$0" && "$@"' "$folder" "$@"
}

home_of() {
  if [[ $1 == root ]]; then echo /root; else echo "/home/$1"; fi
}

megabytes() {
  local path options=(--summarize --one-file-system --block-size=1M)
  for path in ${MOUNT:-}; do
    options+=(--exclude="$root$path")
  done
  du "${options[@]}" "$root" | cut -f 1
}

# Run a step, print its line of the table and, if it failed, the end of its output. Return its exit code.
step() {
  local title=$1 code=0 start=$SECONDS before
  shift
  before=$(megabytes)
  "$@" >"$root.log" 2>&1 || code=$?
  printf '| %s | %s | %d | %d | %d |\n' "$name" "$title" "$code" $((SECONDS - start)) $(($(megabytes) - before))
  if ((code)); then tail -n 80 "$root.log" >&2; fi
  return "$code"
}

install_packages() {
  run_as root / apt-get update &&
    run_as root / env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "$@"
}

run_steps() {
  local user command code=0 packages commands=("make demo" "make test")
  if [[ -n $COMMAND ]]; then commands=("$COMMAND"); fi
  read -r -a packages < <(packages_of_readme)
  mount_system
  step "apt-get install ${packages[*]}" install_packages "${packages[@]}"
  mount_settings
  for user in ${ACCOUNTS:-root tester}; do
    if [[ $user != root ]]; then chroot "$root" useradd --create-home --user-group "$user"; fi
    run_as "$user" "$(home_of "$user")" git -c advice.detachedHead=false clone --quiet /var/tmp/repository.bundle gpt2
    for command in "${commands[@]}"; do
      step "$user: $command" run_as "$user" "$(home_of "$user")/gpt2" bash -c "$command" || code=1
    done
  done
  return "$code"
}

# --- On this machine -------------------------------------------------------------------------------------------------

inside="" # the process that runs the steps

clean_up() {
  if [[ -n $inside ]]; then kill -KILL "$inside" 2>/dev/null || true; fi
  wait
  rm -rf --one-file-system "$base"
}

main() {
  local suite options=(--variant=minbase)
  case ${1:-} in
    debian-12) suite=bookworm ;;
    debian-13) suite=trixie ;;
    ubuntu-24.04) suite=noble options+=("--components=main,universe") ;;
    *) mistake "Pass debian-12, debian-13 or ubuntu-24.04." ;;
  esac
  ((EUID == 0)) || mistake "Run this script as root."
  export name=$1 COMMAND=${2:-}
  base=$(mktemp -d "${FOLDER:-/var/tmp}/fresh_machine.XXXXXX")
  trap 'clean_up' EXIT
  trap 'exit 1' INT TERM
  export root=$base/root
  echo "Installing $name in $root at commit $(git -C "$repository" rev-parse --short HEAD)"
  echo "| system | step | exit code | seconds | MB |"
  echo "| --- | --- | --- | --- | --- |"
  mkdir "$root"
  step "debootstrap" debootstrap "${options[@]}" "$suite" "$root" ${MIRROR:+"$MIRROR"}
  # A bundle, because git refuses to clone a folder of another user.
  git -C "$repository" bundle create --quiet "$root/var/tmp/repository.bundle" HEAD
  # The mounts and all processes end with these namespaces, which end with `unshare`.
  unshare --mount --pid --fork --kill-child bash "${BASH_SOURCE[0]}" &
  inside=$!
  wait "$inside"
}

if [[ -n ${root:-} ]]; then
  mapfile -t settings < <(env | grep -E "$passed_on")
  run_steps
else
  main "$@"
fi
