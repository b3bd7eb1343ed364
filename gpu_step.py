import sys, time, cProfile, pstats, io, json
import torch
from torpor.bench.runners import Spec
from torpor.bench.worker import Racer, Limits, peak, reset_peak
from torpor.bench.workloads import SCALES
name, runner = sys.argv[1:3]
opts = json.loads(sys.argv[3]) if len(sys.argv)>3 else {}
t0=time.time()
torch.set_num_threads(8)
r = Racer(Spec(runner, "cuda", "inductor" if runner.startswith("torpor") else "", tuple(opts.items())), SCALES["full"][name])
w = r.warm_up(Limits(seconds=150, most_steps=40))
print(f"== {name} {runner} {opts}: warm in {time.time()-t0:.0f}s, steps {len(w.step_s)}, cold {w.cold_s:.1f}, settled {w.settled}, losses {w.losses[0]:.4f} {w.losses[-1]:.4f}")
rs=[r.round() for _ in range(5)]
med=lambda xs: sorted(xs)[len(xs)//2]
print(f"   ms {med([x.ms for x in rs]):.2f} recording {med([x.recording_ms for x in rs]):.2f} single {med([x.single_ms for x in rs]):.2f} peak {peak('cuda')>>20} MiB reserved {torch.cuda.max_memory_reserved()>>20}")
if runner=="torpor":
    import torpor
    c=torpor.metrics.counters()
    print("  ", {k:v for k,v in c.items() if not k.startswith("lazy::")})
    from torpor.execute.sync import PLANS
    for p in PLANS.plans.values():
        prog=getattr(p.computation,"program",None); rep=getattr(prog,"replayed",None)
        if prog is not None and hasattr(prog,"steps"):
            from torpor.backends.inductor.graphs import unsafe
            print("   plan", p.record.name, "nodes", len(p.graph.nodes), "in", len(p.inputs), "out", len(p.outputs), "donated", len(p.donated), "steps", len(prog.steps), "alone", sorted({s.node.op.name for s in prog.steps if hasattr(s,"node")})[:8], rep.state() if rep else f"unsafe: {unsafe(prog)}", ("copied", len(rep.graph.copied), "kept", sorted(rep.kept)[:5]) if rep and rep.graph else "")
    torpor.metrics.reset()
    n=20
    for _ in range(n): r.step()
    r.finish()
    for k,v in torpor.metrics.timers().items(): print("   timer", k, v)
    if len(sys.argv)>4:
        pr=cProfile.Profile()
        for _ in range(20):
            r.finish(); pr.enable(); r.step(); pr.disable()
        s=io.StringIO(); pstats.Stats(pr,stream=s).sort_stats("tottime").print_stats(22); print("\n".join(l[:130] for l in s.getvalue().splitlines()[4:]))
if runner=="torpor-compile":
    import torpor, gc
    from torpor.backends.inductor.graphs import Replayed
    print("  ", {k:v for k,v in torpor.metrics.counters().items() if "Graph" in k or "fallback" in k})
    for o in gc.get_objects():
        if isinstance(o, Replayed): print("   ", o.state(), o.graph and (len(o.graph.stay), len(o.graph.copied), len(o.graph.results), len(o.graph.copied_out)))
    from torpor.backends.fx.program import Program
    for o in gc.get_objects():
        if type(o).__name__=="Program" and hasattr(o,"fixes") and o.fixes is not None:
            print("    program", o.name, "steps", len(o.steps), "results", len(o.results), "copies", sum(f.name=="COPY" for f in o.fixes), "alone", sorted({s.node.op.name for s in o.steps if hasattr(s,"node")})[:8])
