# shellcheck shell=bash
# Sourced on a TPU's host, by what scripts/tpu_vm/check sends there.

# check_and_bench OUTPUT FULL MODEL: the check, then three workloads of the demo model and of MODEL, if one is named.
# Ends with the exit code of the check; a bench that fails is said and ends nothing. Needs `run`, which runs or prints.
check_and_bench() {
    local output=$1 full=$2 model=$3 code=0 each workload
    # shellcheck disable=SC2086 # nothing, or one flag
    run ferrum-jax check --output "$output" $full || code=$?
    for each in checkpoints/demo $model; do
        for workload in decode ragged shared_prefix; do
            run bench_into "$output/bench.jsonl" "$each" "$workload" || echo "bench $workload of $each failed" >&2
        done
    done
    return "$code"
}

# bench_into FILE MODEL WORKLOAD: adds the line of a bench to a file, and shows it.
bench_into() {
    ferrum-jax bench --model "$2" --workload "$3" --max-model-len 2048 | tee -a "$1"
}
