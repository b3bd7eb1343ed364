export PYTHONPATH=src PYTHONUNBUFFERED=1 TORPOR_CACHE=0 TORCHINDUCTOR_CACHE_DIR=/tmp/ind TRITON_CACHE_DIR=/tmp/ind/triton
PT="python3 -m pytest -p no:benchmark -p no:cacheprovider -q -W default --tb=short --show-capture=no"
s=$(date +%s)
(timeout 60 python3 gpu_smoke.py > $OUT/smoke.log 2>&1; echo rc $? >> $OUT/smoke.log) &
(timeout 60 $PT tests/laziness/test_on_gpu.py > $OUT/lazygpu.log 2>&1; echo rc $? >> $OUT/lazygpu.log) &
for m in gpt2 resnet; do (timeout 125 $PT -s tests/models/test_on_gpu.py -k "inductor and $m" > $OUT/models_$m.log 2>&1; echo rc $? >> $OUT/models_$m.log) & done
(timeout 100 python3 gpu_step.py bert compile-reduce-overhead > $OUT/bert_ro.log 2>&1) &
for w in bert resnet50 mlp; do (timeout 120 python3 gpu_step.py $w torpor-compile > $OUT/${w}_tc.log 2>&1; echo rc $? >> $OUT/${w}_tc.log) & done
(timeout 120 python3 gpu_step.py gpt2 torpor-compile '{"rng":"fast"}' > $OUT/gpt2_tcfast.log 2>&1; echo rc $? >> $OUT/gpt2_tcfast.log) &
(timeout 120 python3 gpu_step.py gpt2 torpor-compile > $OUT/gpt2_tc.log 2>&1; echo rc $? >> $OUT/gpt2_tc.log) &
(timeout 120 python3 gpu_step.py resnet50 compile-reduce-overhead > $OUT/resnet_ro.log 2>&1) &
wait
echo parallel part took $(( $(date +%s) - s ))
for f in smoke lazygpu models_gpt2 models_resnet; do echo "=== $f"; tail -n 7 $OUT/$f.log | cut -c1-300; done
grep -h "==\|  ms\|Error" $OUT/*_tc*.log $OUT/*_ro.log | cut -c1-250
R="compile-reduce-overhead,torpor-compile"
for w in mlp bert resnet50; do timeout 40 python3 -m torpor bench $w --device cuda --runners $R --rounds 7 --timeout 35 --warm-jobs 2 --keep-caches 2>/dev/null | tail -n 3 | cut -c1-150; done
timeout 45 python3 -m torpor bench gpt2 --device cuda --runners $R --backend-option rng=fast --rounds 5 --round-ms 300 --timeout 40 --warm-jobs 2 --keep-caches 2>/dev/null | tail -n 3 | cut -c1-150
echo all took $(( $(date +%s) - s ))
cd $OUT && tar czf logs.tgz *.log && rm -f *.log
