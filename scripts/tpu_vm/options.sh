# shellcheck shell=bash disable=SC2034 # variables are for the commands
# Sourced by the commands of this folder, which all take the same options; runs gcloud, or with --dry-run prints it.
# A command sets `about` before it calls read_options.

about="" name="" zone="" project="" accelerator=v6e-8 runtime="" spot=yes python=python3.11 interval=60
dry_run="" until_running=""
job=()     # what stands after --: arguments of `ferrum-jax batch`
answers=() # of --dry-run, to the questions that a command asks

usage() {
    cat <<END
scripts/tpu_vm/$(basename "$0"): $about

  --name NAME              of the TPU and of its request in the queue
  --zone ZONE              such as us-east5-b
  --project PROJECT        default: gcloud's own
  --accelerator-type TYPE  default: v6e-8; also v5litepod-16, v5p-8, v6e-16 and the like
  --runtime-version NAME   default: the one for the type, such as v2-alpha-tpuv6e
  --on-demand              full price, and not taken away; the default is a spot TPU
  --python PYTHON          3.11 or newer on the TPU's hosts, installed from Ubuntu's archive if missing; default: python3.11
  --interval SECONDS       between two looks of watch and resume; default: 60
  --dry-run                print each command and run none
  -- ARGUMENTS             of \`ferrum-jax batch\`, for run, watch and resume: --model gs://... --input ... --output ...
END
}

fail() {
    echo "scripts/tpu_vm/$(basename "$0"): $*" >&2
    exit 2
}

read_options() {
    while [ $# -gt 0 ]; do
        case $1 in
            --help | -h) usage && exit ;;
            --dry-run) dry_run=yes ;;
            --on-demand) spot="" ;;
            --until-running) until_running=yes ;; # what resume asks of watch
            --)
                shift
                job=("$@")
                break
                ;;
            --name | --zone | --project | --accelerator-type | --runtime-version | --python | --interval)
                [ $# -gt 1 ] || fail "$1 needs a value"
                case $1 in
                    --name) name=$2 ;;
                    --zone) zone=$2 ;;
                    --project) project=$2 ;;
                    --accelerator-type) accelerator=$2 ;;
                    --runtime-version) runtime=$2 ;;
                    --python) python=$2 ;;
                    --interval) interval=$2 ;;
                esac
                shift
                ;;
            *) fail "$1 is no option; see --help" ;;
        esac
        shift
    done
    [ -n "$name" ] || fail "--name is missing; see --help"
    [ -n "$zone" ] || fail "--zone is missing; see --help"
    [ -n "$runtime" ] || runtime=$(runtime_of "$accelerator")
    place=(--zone "$zone")
    [ -z "$project" ] || place+=(--project "$project")
}

need_job() {
    [ ${#job[@]} -gt 0 ] || fail "after -- stand the arguments of \`ferrum-jax batch\`; see --help"
    local output="" before="" argument
    for argument in "${job[@]}"; do
        [ "$before" != --output ] || output=$argument
        [ "${argument#--output=}" = "$argument" ] || output=${argument#--output=}
        before=$argument
    done
    case $output in
        gs://*) ;; # hosts of a spot TPU are gone with their disks
        *) fail "--output is '$output'; it must be a gs:// URL: it is what a preempted job goes on from" ;;
    esac
}

# Source: cloud.google.com/tpu/docs/runtimes
runtime_of() {
    case $1 in
        v6e-*) echo v2-alpha-tpuv6e ;;
        v5p-*) echo v2-alpha-tpuv5 ;;
        v5litepod-*) echo v2-alpha-tpuv5-lite ;;
        *) fail "no runtime version is known for $1; give --runtime-version" ;;
    esac
}

# run COMMAND...: runs it, or prints it.
run() {
    if [ -n "$dry_run" ]; then
        printf '%q ' "$@" | sed 's/ $//'
        echo
    else
        "$@"
    fi
}

# ask COMMAND...: its output in `answer`; fails as it does. A dry run prints it and takes the next of `answers`.
ask() {
    if [ -n "$dry_run" ]; then
        run "$@"
        answer=${answers[0]}
        answers=("${answers[@]:1}")
    else
        answer=$("$@")
    fi
}


# ssh_to WORKER COMMAND: the gcloud command in `ssh`.
ssh_to() {
    ssh=(gcloud compute tpus tpu-vm ssh "$name" "${place[@]}" "--worker=$1" "--command=$2")
}
