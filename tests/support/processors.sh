#!/bin/sh
# Runs the tests that compute as other processors and loads would: kernels of other instruction sets, which add in
# other orders, with 1, 2 and 4 threads; and beside eight busy processes of low priority. Threads that wait sleep, since
# there are more of them than cores: the sums stay the same. Arguments go to pytest.
#   make test-processors            all of them, in turn
#   make test-processors ONLY=sse   one of: sse avx2 threads load
COMPUTES="tests/laws/test_7_parity.py tests/laws/test_7_same_loss.py tests/clients tests/cpu tests/sim tests/null"
failed=""

case "$ONLY" in
    "" | sse | avx2 | threads | load) ;;
    *)
        echo "ONLY=$ONLY, but it is sse, avx2, threads or load"
        exit 2
        ;;
esac

run() {  # name, then variables
    name=$1
    shift
    [ -n "$ONLY" ] && [ "$ONLY" != "$name" ] && return
    echo "--- $name: $*"
    # shellcheck disable=SC2086
    env OMP_WAIT_POLICY=PASSIVE "$@" $PYTEST $COMPUTES $ARGUMENTS || failed="$failed $name"
}

ARGUMENTS=$*
run sse ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=1
run avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=2
run threads OMP_NUM_THREADS=4 MKL_DYNAMIC=FALSE  # else torch takes no more threads than there are cores

busy=""
if [ -z "$ONLY" ] || [ "$ONLY" = load ]; then
    for _ in 1 2 3 4 5 6 7 8; do
        nice -n 10 sh -c 'while :; do :; done' &
        busy="$busy $!"
    done
    # shellcheck disable=SC2064,SC2086
    trap "kill $busy 2>/dev/null" EXIT
fi
run load OMP_NUM_THREADS=1

[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
