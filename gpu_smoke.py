import torch, torpor, gc
from torch import nn
def net(): return nn.Sequential(nn.Linear(64,64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64,64), nn.ReLU(), nn.Linear(64,8))
def train(lazy, steps=40, fresh=True):
    torch.manual_seed(0)
    m=net().cuda(); place=torpor.lazy if lazy else (lambda t:t)
    m=place(m); opt=torch.optim.AdamW(m.parameters(), lr=1e-3)
    losses=[]
    g=torch.Generator(device="cuda").manual_seed(1)
    for i in range(steps):
        x=torch.randn(32,64,device="cuda",generator=g); y=torch.randint(8,(32,),device="cuda",generator=g)
        x,y=place(x),place(y)
        loss=nn.functional.cross_entropy(m(x),y); loss.backward(); opt.step(); opt.zero_grad()
        losses.append(loss.detach())
    out=[l.item() for l in losses]
    return out, torch.cuda.get_rng_state().tolist()[-8:], [p.detach().cpu() for p in m.parameters()]
e,ge,pe=train(False); 
torpor.use("inductor")
l,gl,pl=train(True)
print("max loss diff", max(abs(a-b) for a,b in zip(e,l)), "gen equal", ge==gl)
c=torpor.metrics.counters(); print({k:v for k,v in c.items() if "Graph" in k or "Donat" in k or "Compile" in k})
from torpor.execute.sync import PLANS
for p in PLANS.plans.values():
    rep=getattr(p.computation.program,"replayed",None)
    print(p.record.name, len(p.graph.nodes), rep.state() if rep else None, rep and rep.graph and (len(rep.graph.copied), len(rep.graph.stay)))
# held outputs
torpor.metrics.reset()
x=torpor.lazy(torch.randn(256,256,device="cuda")); w=torpor.lazy(torch.randn(256,256,device="cuda"))
held=[]; ref=[]
for i in range(30):
    y=(x@w).relu()+float(0); torpor.sync(); held.append(y); x=x*1.0+0.01; torpor.sync()
held=[h.cpu() for h in held]
xe=None
print({k:v for k,v in torpor.metrics.counters().items() if "Graph" in k})
bad=sum(int(torch.equal(held[i],held[i+1])) for i in range(29)); print("equal neighbours (must be 0):", bad)
PLANS.clear(); gc.collect(); torch.cuda.empty_cache(); print("reserved after drop MiB", torch.cuda.memory_reserved()>>20)
# compile through dynamo
import torpor.compat.dynamo as d
def ctrain(compiled):
    torch.manual_seed(0); m=net().eval().cuda(); opt=torch.optim.SGD(m.parameters(), lr=1e-2)
    f=lambda x,y: nn.functional.cross_entropy(m(x),y)
    if compiled: f=torch.compile(f, backend=d.torpor, options={"backend":"inductor"})
    g=torch.Generator(device="cuda").manual_seed(1); ls=[]
    for i in range(40):
        x=torch.randn(32,64,device="cuda",generator=g); y=torch.randint(8,(32,),device="cuda",generator=g)
        loss=f(x,y); loss.backward(); opt.step(); opt.zero_grad(); ls.append(loss.detach())
    return [l.item() for l in ls]
torpor.metrics.reset()
a,b=ctrain(False),ctrain(True)
print("compat diff", max(abs(x-y) for x,y in zip(a,b)), {k:v for k,v in torpor.metrics.counters().items() if "Graph" in k})
