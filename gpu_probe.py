import sys, threading, torch, traceback
seen={}
def offset():
    return torch.cuda.default_generators[0].get_offset() if torch.cuda.is_initialized() else 0
last=[0]; n=[0]
def prof(frame, event, arg):
    if event in ("c_return","return"):
        o=offset()
        if o!=last[0]:
            d=o-last[0]; last[0]=o
            n[0]+=1
            name=getattr(arg,"__name__",arg) if event=="c_return" else frame.f_code.co_name
            st=[f"{f.f_code.co_filename.rsplit('/',1)[-1]}:{f.f_lineno}:{f.f_code.co_name}" for f in _up(frame,14)]
            print(f"OFFSET {o} (+{d}) {event} {str(name)[:60]} [{threading.current_thread().name}] <- "+" < ".join(st), file=sys.__stderr__, flush=True)
def _up(f,k):
    while f is not None and k:
        yield f; f=f.f_back; k-=1
import pytest
@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    torch.cuda.init()
    print("TEST", item.nodeid, file=sys.__stderr__)
    threading.setprofile_all_threads(prof) if hasattr(threading,"setprofile_all_threads") else threading.setprofile(prof)
    sys.setprofile(prof)
    try:
        return (yield)
    finally:
        sys.setprofile(None); threading.setprofile(None)
        if hasattr(threading,"setprofile_all_threads"): threading.setprofile_all_threads(None)
