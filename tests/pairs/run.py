import asyncio,sys,tempfile,collections,time,traceback
from pathlib import Path
from tests.pairs.case import Case, broken_by
def main(seeds, verbose=False):
    groups=collections.defaultdict(list)
    t0=time.process_time(); w0=time.time(); n=0
    for seed in seeds:
        case=Case(seed); n+=1
        try:
            found,story=asyncio.run(broken_by(case, Path(tempfile.mkdtemp(prefix="pairs"))))
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt): raise
            found,story=[f"X: {type(e).__name__}: {e} @ {traceback.extract_tb(e.__traceback__)[-1]}"],[]
            if verbose: traceback.print_exc()
        if verbose:
            print(case); print("\n".join("   "+s for s in story)); print("\n".join(found))
        for f in found: groups[f].append(str(case))
    print(n,"cases", time.process_time()-t0,"cpu", time.time()-w0,"wall")
    return groups
if __name__=="__main__":
    import re
    a=sys.argv[1:]
    seeds=range(*map(int,a[0].split(":"))) if ":" in a[0] else list(map(int,a[0].split(",")))
    groups=main(seeds, len(a)>1)
    merged=collections.defaultdict(list)
    for f,c in groups.items():
        merged[re.sub(r"[wtd]\d+x\d+|[a-j]*x?[0-9a-f-]{36}|sub-\w+|[wtd][a-j]+x[a-j]+","#",f)[:160]]+=c
    for f,c in sorted(merged.items(), key=lambda x:-len(x[1])): print(len(c), f, "|", c[:3])
