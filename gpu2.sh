export PYTHONPATH=src PYTHONUNBUFFERED=1 TORPOR_CACHE=0 TORCHINDUCTOR_CACHE_DIR=/tmp/ind TRITON_CACHE_DIR=/tmp/ind/triton
PT="python3 -m pytest -p no:benchmark -p no:cacheprovider -q -W default --tb=short --show-capture=no"
s=$(date +%s)
(timeout 85 $PT tests/laziness/test_on_gpu.py > $OUT/lazygpu.log 2>&1; echo rc $? >> $OUT/lazygpu.log) &
for r in compile-reduce-overhead torpor-compile; do for w in gpt2 resnet50; do
(timeout 95 python3 gpu_step.py $w $r > $OUT/${w}_$r.log 2>&1; echo rc $? >> $OUT/${w}_$r.log) &
done; done
for r in compile compile-reduce-overhead torpor-compile torpor; do
(timeout 80 python3 gpu_step.py bert $r > $OUT/bert_$r.log 2>&1) &
done
wait
echo parallel part took $(( $(date +%s) - s ))
tail -n 12 $OUT/lazygpu.log | cut -c1-250
grep -h "==\|  ms\|Error\|graph\|program" $OUT/*_torpor-compile.log | cut -c1-200
B="python3 -m torpor bench --device cuda --timeout 40 --warm-jobs 5 --keep-caches"
timeout 40 $B gpt2 --runners compile-reduce-overhead,torpor-compile --rounds 5 --round-ms 300 2>/dev/null | tail -n 3 | cut -c1-150
timeout 35 $B mlp --rounds 7 2>/dev/null | tail -n 7 | cut -c1-170
timeout 35 $B bert --rounds 7 2>/dev/null | tail -n 7 | cut -c1-170
timeout 40 $B resnet50 --runners compile-reduce-overhead,torpor-compile --rounds 5 --round-ms 200 2>/dev/null | tail -n 3 | cut -c1-150
echo all took $(( $(date +%s) - s ))
