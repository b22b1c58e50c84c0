"""The numbered cases of PyTorch's expandable segments (docs/behaviour/pytorch.md), as texts that
`expandable_script.Runner` takes on any subject.

Left out are those that need handle types, peers, other processes, two devices or a pool with an
allocator of its own: EX-31 to 33, 38 to 41, 44 and 45. Lines for "upstream:" and "ours:" are the
documented differences: where a call of the driver fails, ours undoes what it has done.
"""

from __future__ import annotations

from expandable_script import Case, parse_cases

TEXT = """
EX-1: a small block
    alloc a 512 -> R0
    calls reserve(R0,92160M) c2 m(R0) a(R0,2M)
    blocks R0 2M[512:A 1M+1023K+512:-]
    stats reserved=2M small=2M da=1 segment=0 split=0

EX-2: a large block
    alloc a 2M -> R0
    calls reserve(R0,92160M) c20 m(R0) a(R0,20M)
    blocks R0 20M[2M:A 18M:-]

EX-3: two chunks in one mapping
    alloc a 25M -> R0
    calls reserve(R0,92160M) c20 c20 m(R0) m(R0+20M) a(R0,40M)
    blocks R0 40M[25M:A 15M:-]
    stats da=1 reserved=40M
    trace segment_map(R0,40M)

EX-4: growth behind a free end
    alloc a 2M -> R0
    calls reserve(R0,92160M) c20 m(R0) a(R0,20M)
    alloc b 32M -> R0+2M
    calls c20 m(R0+20M) a(R0+20M,20M)
    blocks R0 40M[2M:A 32M:A 6M:-]
    stats da=2 reserved=40M

EX-5: one chunk each
    alloc a 20M -> R0
    alloc b 20M -> R0+20M
    blocks R0 40M[20M:A 20M:A]
    stats da=2

EX-6: a range for each kind
    alloc a 1M -> R0
    alloc b 1M+1 -> R1
    calls reserve(R0,92160M) c2 m(R0) a(R0,2M) reserve(R1,92160M) c20 m(R1) a(R1,20M)
    blocks R0 2M[1M:A 1M:-]; R1 20M[1M+512:A 18M+1023K+512:-]
    stats small=2M large=20M

EX-7: a small block straddles two chunks
    alloc a 1M -> R0
    alloc b 1M -> R0+1M
    alloc c 1M -> R0+2M
    calls reserve(R0,92160M) c2 m(R0) a(R0,2M) c2 m(R0+2M) a(R0+2M,2M)
    alloc d 600K -> R0+3M
    calls none
    alloc e 600K -> R0+3M+600K
    calls c2 m(R0+4M) a(R0+4M,2M)
    blocks R0 6M[1M:A 1M:A 1M:A 600K:A 600K:A 1M+848K:-]

EX-8: a reservation is rounded up to chunks [device 104981056]
    alloc a 4M -> R0
    calls reserve(R0,120M) c20 m(R0) a(R0,20M)

EX-9: giving all back
    alloc a 25M -> R0
    free a
    calls reserve(R0,92160M) c20 c20 m(R0) m(R0+20M) a(R0,40M)
    empty
    calls wait(0) u(R0,20M) r1 u(R0+20M,20M) r2 unreserve(R0)
    stats reserved=0 df=1 waits=1
    trace segment_map(R0,40M) segment_unmap(R0,40M)
    alloc a 4M -> R1
    calls reserve(R1,92160M) c20 m(R1) a(R1,20M)

EX-10: giving whole chunks back
    alloc a 1M+512K -> R0
    alloc b 30M -> R0+1M+512K
    free b
    calls reserve(R0,92160M) c20 m(R0) a(R0,20M) c20 m(R0+20M) a(R0+20M,20M)
    empty
    calls wait(0) u(R0+20M,20M) r2
    blocks R0 20M[1M+512K:A 18M+512K:-]
    stats df=1 reserved=20M

EX-11: no whole chunk is free
    alloc a 10M -> R0
    alloc b 20M -> R0+10M
    alloc c 10M -> R0+30M
    free b
    calls reserve(R0,92160M) c20 m(R0) a(R0,20M) c20 m(R0+20M) a(R0+20M,20M)
    empty
    calls none
    blocks R0 40M[10M:A 20M:- 10M:A]
    stats waits=1 df=0

EX-12: a hole that is used again, with its edge
    alloc a 10M -> R0
    alloc b 60M -> R0+10M
    alloc c 10M -> R0+70M
    free b
    empty
    blocks R0 20M[10M:A 10M:-]; R0+60M 20M[10M:- 10M:A]
    calls reserve(R0,92160M) c20 m(R0) a(R0,20M) c20 c20 c20 m(R0+20M) m(R0+40M) m(R0+60M)
        a(R0+20M,60M) wait(0) u(R0+20M,20M) r2 u(R0+40M,20M) r3
    alloc d 30M -> R0+10M
    calls c20 m(R0+20M) a(R0+20M,20M)
    blocks R0 40M[10M:A 30M:A]; R0+60M 20M[10M:- 10M:A]

EX-13: a hole between two edges
    alloc a 10M -> R0
    alloc b 60M -> R0+10M
    alloc c 10M -> R0+70M
    free b
    empty
    calls reserve(R0,92160M) c20 m(R0) a(R0,20M) c20 c20 c20 m(R0+20M) m(R0+40M) m(R0+60M)
        a(R0+20M,60M) wait(0) u(R0+20M,20M) r2 u(R0+40M,20M) r3
    alloc d 60M -> R0+10M
    calls c20 c20 m(R0+20M) m(R0+40M) a(R0+20M,40M)
    blocks R0 80M[10M:A 60M:A 10M:A]

EX-13b: a hole that is too small by 1 MiB
    alloc a 10M -> R0
    alloc b 60M -> R0+10M
    alloc c 10M -> R0+70M
    free b
    empty
    calls reserve(R0,92160M) c20 m(R0) a(R0,20M) c20 c20 c20 m(R0+20M) m(R0+40M) m(R0+60M)
        a(R0+20M,60M) wait(0) u(R0+20M,20M) r2 u(R0+40M,20M) r3
    alloc d 61M -> R0+80M
    calls c20 c20 c20 c20 m(R0+80M) m(R0+100M) m(R0+120M) m(R0+140M) a(R0+80M,80M)
    blocks R0 20M[10M:A 10M:-]; R0+60M 100M[10M:- 10M:A 61M:A 19M:-]

EX-14: unmapped blocks merge
    alloc a 20M -> R0
    alloc b 20M -> R0+20M
    alloc c 20M -> R0+40M
    alloc d 20M -> R0+60M
    alloc e 20M -> R0+80M
    free b
    empty
    free c
    empty
    calls reserve(R0,92160M) c20 m(R0) a(R0,20M) c20 m(R0+20M) a(R0+20M,20M) c20 m(R0+40M)
        a(R0+40M,20M) c20 m(R0+60M) a(R0+60M,20M) c20 m(R0+80M) a(R0+80M,20M) wait(0) u(R0+20M,20M)
        r2 wait(0) u(R0+40M,20M) r3
    alloc f 40M -> R0+20M
    calls c20 c20 m(R0+20M) m(R0+40M) a(R0+20M,40M)
    blocks R0 100M[20M:A 40M:A 20M:A 20M:A]

EX-15: the lowest hole that is large enough
    alloc a 20M -> R0
    alloc b 20M -> R0+20M
    alloc c 20M -> R0+40M
    alloc d 20M -> R0+60M
    alloc e 20M -> R0+80M
    alloc f 20M -> R0+100M
    alloc g 20M -> R0+120M
    free b d e
    empty
    calls reserve(R0,92160M) c20 m(R0) a(R0,20M) c20 m(R0+20M) a(R0+20M,20M) c20 m(R0+40M)
        a(R0+40M,20M) c20 m(R0+60M) a(R0+60M,20M) c20 m(R0+80M) a(R0+80M,20M) c20 m(R0+100M)
        a(R0+100M,20M) c20 m(R0+120M) a(R0+120M,20M) wait(0) u(R0+20M,20M) r2 wait(0) u(R0+60M,20M)
        r4 u(R0+80M,20M) r5
    alloc h 30M -> R0+60M
    calls c20 c20 m(R0+60M) m(R0+80M) a(R0+60M,40M)
    alloc i 8M -> R0+90M
    calls none
    blocks R0 20M[20M:A]; R0+40M 100M[20M:A 30M:A 8M:A 2M:- 20M:A 20M:A]

EX-16: a hole is preferred to the end of the range
    alloc a 8M -> R0
    alloc b 6M -> R0+8M
    free a
    alloc c 5M -> R0
    blocks R0 20M[5M:A 3M:- 6M:A 6M:-]

EX-17: memory moves between streams by the retry [device 110M]
    alloc a 60M s2 -> R0
    free a
    calls reserve(R0,140M) c20 c20 c20 m(R0) m(R0+20M) m(R0+40M) a(R0,60M)
    alloc b 60M s4 -> R1
    calls reserve(R1,140M) c20 c20 c20! r4 r5 wait(2) u(R0,20M) r1 u(R0+20M,20M) r2 u(R0+40M,20M) r3
        unreserve(R0) c20 c20 c20 m(R1) m(R1+20M) m(R1+40M) a(R1,60M)
    stats retries=1 da=2 df=1

EX-18: memory moves between kinds by the retry [device 110M]
    many a 40 1M -> R0
    free a*
    calls reserve(R0,124M) c2 m(R0) a(R0,2M) c2 m(R0+2M) a(R0+2M,2M) c2 m(R0+4M) a(R0+4M,2M) c2
        m(R0+6M) a(R0+6M,2M) c2 m(R0+8M) a(R0+8M,2M) c2 m(R0+10M) a(R0+10M,2M) c2 m(R0+12M)
        a(R0+12M,2M) c2 m(R0+14M) a(R0+14M,2M) c2 m(R0+16M) a(R0+16M,2M) c2 m(R0+18M) a(R0+18M,2M)
        c2 m(R0+20M) a(R0+20M,2M) c2 m(R0+22M) a(R0+22M,2M) c2 m(R0+24M) a(R0+24M,2M) c2 m(R0+26M)
        a(R0+26M,2M) c2 m(R0+28M) a(R0+28M,2M) c2 m(R0+30M) a(R0+30M,2M) c2 m(R0+32M) a(R0+32M,2M)
        c2 m(R0+34M) a(R0+34M,2M) c2 m(R0+36M) a(R0+36M,2M) c2 m(R0+38M) a(R0+38M,2M)
    alloc g 100M -> R1
    calls reserve(R1,140M) c20 c20 c20 c20! r21 r22 r23 wait(0) u(R0,2M) r1 u(R0+2M,2M) r2
        u(R0+4M,2M) r3 u(R0+6M,2M) r4 u(R0+8M,2M) r5 u(R0+10M,2M) r6 u(R0+12M,2M) r7 u(R0+14M,2M) r8
        u(R0+16M,2M) r9 u(R0+18M,2M) r10 u(R0+20M,2M) r11 u(R0+22M,2M) r12 u(R0+24M,2M) r13
        u(R0+26M,2M) r14 u(R0+28M,2M) r15 u(R0+30M,2M) r16 u(R0+32M,2M) r17 u(R0+34M,2M) r18
        u(R0+36M,2M) r19 u(R0+38M,2M) r20 unreserve(R0) c20 c20 c20 c20 c20 m(R1) m(R1+20M)
        m(R1+40M) m(R1+60M) m(R1+80M) a(R1,100M)
    stats df=1 retries=1 da=21
    blocks R1 100M[100M:A]

EX-19: what fails leaves reservations [device 100M]
    alloc a 200M -> oom
    calls reserve(R0,120M) c20 c20 c20 c20 c20 c20! r1 r2 r3 r4 r5 reserve(R1,120M) c20 c20 c20 c20
        c20 c20! r6 r7 r8 r9 r10
    alloc a 200M -> oom
    calls reserve(R2,120M) c20 c20 c20 c20 c20 c20! r11 r12 r13 r14 r15 reserve(R3,120M) c20 c20 c20
        c20 c20 c20! r16 r17 r18 r19 r20
    stats retries=2 ooms=2 reserved=0
    empty
    calls none
    alloc b 10M -> R0
    calls c20 m(R0) a(R0,20M)

EX-20: a pending block cannot be passed
    alloc a 10M -> R0
    alloc b 10M -> R0+10M
    calls reserve(R0,92160M) c20 m(R0) a(R0,20M)
    hold 2
    use b 2
    free b
    alloc c 12M -> R0+20M
    calls record(2) query(2) c20 m(R0+20M) a(R0+20M,20M)
    blocks R0 40M[10M:A 10M:P 12M:A 8M:-]

EX-21: what was mapped before a failure stays [device 70M]
    alloc a 20M -> R0
    alloc b 20M -> R0+20M
    alloc c 20M -> R0+40M
    free a c
    empty
    free b
    resize 50M
    create 2
    begin 2 none
    calls reserve(R0,80M) c20 m(R0) a(R0,20M) c20 m(R0+20M) a(R0+20M,20M) c20 m(R0+40M)
        a(R0+40M,20M) wait(0) u(R0,20M) r1 wait(0) u(R0+40M,20M) r3
    stats da=3 df=2
    alloc d 60M -> oom
    calls c20 m(R0) a(R0,20M) c20!
    blocks R0 40M[40M:-]
    stats da=4 df=2 reserved=40M retries=0 ooms=1

EX-21b: the same with a retry [device 70M]
    alloc a 20M -> R0
    alloc b 20M -> R0+20M
    alloc c 20M -> R0+40M
    free a c
    empty
    free b
    resize 50M
    calls reserve(R0,80M) c20 m(R0) a(R0,20M) c20 m(R0+20M) a(R0+20M,20M) c20 m(R0+40M)
        a(R0+40M,20M) wait(0) u(R0,20M) r1 wait(0) u(R0+40M,20M) r3
    alloc d 60M -> oom
    calls c20 m(R0) a(R0,20M) c20! wait(0) u(R0,20M) r4 u(R0+20M,20M) r2 unreserve(R0)
        reserve(R1,60M) c20 c20 c20! r5 r6
    blocks none
    stats reserved=0 retries=1 ooms=1

EX-22: nothing is given back in a scope
    alloc a 4M -> R0
    free a
    create 2
    begin 2 none
    calls reserve(R0,92160M) c20 m(R0) a(R0,20M)
    empty
    calls none
    blocks R0 20M[20M:-]
    end 2
    empty
    calls wait(0) u(R0,20M) r1 unreserve(R0)
    blocks none

EX-23: the limit is tested before chunks are counted [device 200M]
    fraction 0.06
    alloc a 10M -> R0
    stats reserved=20M
    calls reserve(R0,240M) c20 m(R0) a(R0,20M)
    alloc b 12M -> oom
    calls none
    stats reserved=20M ooms=1 retries=1

EX-23b: a request counts as a whole segment against the limit [device 200M]
    fraction 0.1
    alloc a 9M -> R0
    stats reserved=20M
    calls reserve(R0,240M) c20 m(R0) a(R0,20M)
    alloc b 20M -> oom
    calls none
    fraction 0.2
    alloc b 20M -> R0+9M
    calls c20 m(R0+20M) a(R0+20M,20M)
    stats reserved=40M

EX-24: blocks above max_split_size are split [settings
        expandable_segments:True,max_split_size_mb:32]
    alloc a 84M -> R0
    free a
    calls reserve(R0,92160M) c20 c20 c20 c20 c20 m(R0) m(R0+20M) m(R0+40M) m(R0+60M) m(R0+80M)
        a(R0,100M)
    stats oversize=0
    alloc b 16M -> R0
    calls none
    blocks R0 100M[16M:A 84M:-]
    stats oversize=0 oversize_segments=0

EX-24b: on a full device [device 200M; settings expandable_segments:True,max_split_size_mb:32]
    alloc a 100M -> R0
    stats oversize=1 oversize_segments=0
    free a
    calls reserve(R0,240M) c20 c20 c20 c20 c20 m(R0) m(R0+20M) m(R0+40M) m(R0+60M) m(R0+80M)
        a(R0,100M)
    alloc b 40M -> R0
    calls none
    blocks R0 100M[40M:A 60M:-]
    stats oversize=1 oversize_segments=0

EX-25: collection passes over ranges [device 400M; settings
        expandable_segments:True,garbage_collection_threshold:0.5]
    fraction 0.5
    alloc a 120M -> R0
    free a
    calls reserve(R0,460M) c20 c20 c20 c20 c20 c20 m(R0) m(R0+20M) m(R0+40M) m(R0+60M) m(R0+80M)
        m(R0+100M) a(R0,120M)
    alloc b 4M s2 -> R1
    calls reserve(R1,460M) c20 m(R1) a(R1,20M)
    stats reserved=140M df=0

EX-25b: a range that one block fills counts in the average age of a collection [device 400M;
        settings expandable_segments:True,garbage_collection_threshold:0.3]
    fraction 0.5
    resize 50M
    alloc a 10M s2 -> R0
    resize 400M
    free a
    alloc b 60M s2 -> R0
    free b
    blocks R0 60M[60M:-]
    set garbage_collection_threshold:0.3,expandable_segments:False
    alloc c 30M -> S0
    free c
    many d 10 2M s4 -> S1
    alloc e 32M -> S2
    free e
    calls reserve(R0,60M) c20 m(R0) a(R0,20M) c20 c20 m(R0+20M) m(R0+40M) a(R0+20M,40M)
        malloc(S0,30M) malloc(S1,20M) malloc(S2,32M)
    alloc f 20M s6 -> S3
    calls free(S0,30M) malloc(S3,20M)
    stats reserved=132M df=1 retries=0

EX-26: rounding up to parts of powers of two [settings
        expandable_segments:True,roundup_power2_divisions:4]
    alloc a 84M -> R0
    calls reserve(R0,92160M) c20 c20 c20 c20 c20 m(R0) m(R0+20M) m(R0+40M) m(R0+60M) m(R0+80M)
        a(R0,100M)
    alloc b 1200 -> R1
    calls reserve(R1,92160M) c2 m(R1) a(R1,2M)
    blocks R0 100M[96M:A 4M:-]; R1 2M[1K+512:A 1M+1022K+512:-]

EX-27: with the option off, ranges are kept and not used
    alloc a 4M -> R0
    free a
    set expandable_segments:False
    calls reserve(R0,92160M) c20 m(R0) a(R0,20M)
    alloc b 4M -> S0
    calls malloc(S0,20M)
    blocks S0 20M[4M:A 16M:-]; R0 20M[20M:-]
    empty
    calls wait(0) u(R0,20M) r1 unreserve(R0)
    blocks S0 20M[4M:A 16M:-]

EX-27b: with the option off, free blocks of ranges merge
    alloc a 4M -> R0
    alloc b 6M -> R0+4M
    set expandable_segments:False
    free a b
    calls reserve(R0,92160M) c20 m(R0) a(R0,20M)
    set expandable_segments:True
    alloc c 9M -> R0
    calls none
    blocks R0 20M[9M:A 11M:-]

EX-28: with the option on, ordinary blocks are used and split [settings expandable_segments:False]
    alloc a 12M -> S0
    free a
    calls malloc(S0,12M)
    set expandable_segments:True
    alloc b 11M -> S0
    calls none
    stats split=1 split_bytes=1M
    alloc c 3M -> R0
    calls reserve(R0,92160M) c20 m(R0) a(R0,20M)
    blocks S0 12M[11M:A 1M:-]; R0 20M[3M:A 17M:-]

EX-29: memory of ranges is not lent [device 300M]
    create 2
    lend 2
    begin 2
    alloc a 100M -> R0
    free a
    end 2
    resize 120M
    calls reserve(R0,340M) c20 c20 c20 c20 c20 m(R0) m(R0+20M) m(R0+40M) m(R0+60M) m(R0+80M)
        a(R0,100M)
    alloc b 60M -> oom
    calls reserve(R1,140M) c20 c20! r6 c20 c20! r7
    stats retries=1 ooms=1
    blocks R0 100M[100M:-]

EX-30: chunks as large as large_segment_size_mb says [settings
        expandable_segments:True,large_segment_size_mb:40]
    alloc a 2M -> R0
    alloc b 45M -> R0+2M
    alloc c 512 -> R1
    calls reserve(R0,92160M) c40 m(R0) a(R0,40M) c40 m(R0+40M) a(R0+40M,40M) reserve(R1,92160M) c2
        m(R1) a(R1,2M)
    blocks R0 80M[2M:A 45M:A 33M:-]; R1 2M[512:A 1M+1023K+512:-]

EX-34: a mapping fails
    alloc a 4M -> R0
    calls reserve(R0,92160M) c20 m(R0) a(R0,20M)
    fail map 2
    alloc b 60M -> driver
    upstream: calls c20 c20 c20 m(R0+20M) m(20M)!
    ours: calls c20 c20 c20 m(R0+20M) m(20M)! u(R0+20M,20M) r2 r3 r4
    stats reserved=20M da=1 ooms=0 retries=0
    blocks R0 20M[4M:A 16M:-]
    upstream: alloc b 60M -> internal
    upstream: calls none
    ours: alloc b 60M -> R0+4M
    ours: calls c20 c20 c20 m(R0+20M) m(R0+40M) m(R0+60M) a(R0+20M,60M)

EX-35: giving access fails
    alloc a 4M -> R0
    calls reserve(R0,92160M) c20 m(R0) a(R0,20M)
    fail access 1
    alloc b 60M -> driver
    upstream: calls c20 c20 c20 m(R0+20M) m(R0+40M) m(R0+60M) a(60M)!
    ours: calls c20 c20 c20 m(R0+20M) m(R0+40M) m(R0+60M) a(60M)! u(R0+20M,60M) r2 r3 r4
    stats reserved=20M da=1 ooms=0 retries=0
    blocks R0 20M[4M:A 16M:-]
    upstream: alloc b 60M -> internal
    upstream: calls none
    ours: alloc b 60M -> R0+4M

EX-36: a reservation fails
    fail reserve 1
    alloc a 4M -> driver
    calls reserve(92160M)!
    stats reserved=0 da=0 ooms=0 retries=0
    alloc a 4M -> R0
    calls reserve(R0,92160M) c20 m(R0) a(R0,20M)

EX-37: an unmapping fails
    alloc a 25M -> R0
    free a
    calls reserve(R0,92160M) c20 c20 m(R0) m(R0+20M) a(R0,40M)
    fail unmap 1
    empty -> driver
    upstream: calls wait(0) u(20M)!
    upstream: blocks R0 40M[40M:-]
    upstream: stats reserved=40M df=0
    upstream: alloc b 25M -> R0
    upstream: calls none
    ours: alloc b 25M -> not R0

EX-42: a private pool has ranges of its own
    alloc a 4M -> R0
    free a
    create 2
    begin 2
    calls reserve(R0,92160M) c20 m(R0) a(R0,20M)
    alloc b 4M -> R1
    calls reserve(R1,92160M) c20 m(R1) a(R1,20M)
    free b
    end 2
    release 2
    empty
    calls wait(0) u(R0,20M) r1 unreserve(R0)
    blocks R1 20M[20M:-]
    release 2
    empty
    calls wait(0) u(R1,20M) r2 unreserve(R1)
    blocks none

EX-43: in which order ranges are given back
    alloc a 4M s0x9a00 -> R0
    alloc b 4M s0x9900 -> R1
    alloc c 512 -> R2
    alloc d 4M -> R3
    free a b c d
    calls reserve(R0,92160M) c20 m(R0) a(R0,20M) reserve(R1,92160M) c20 m(R1) a(R1,20M)
        reserve(R2,92160M) c2 m(R2) a(R2,2M) reserve(R3,92160M) c20 m(R3) a(R3,20M)
    empty
    calls wait(0) u(R3,20M) r4 unreserve(R3) wait(39168) u(R1,20M) r2 unreserve(R1) wait(39424)
        u(R0,20M) r1 unreserve(R0) wait(0) u(R2,2M) r3 unreserve(R2)

EX-43b: ordinary segments are given back before ranges
    alloc a 4M -> R0
    set expandable_segments:False
    alloc b 4M -> S0
    free a b
    calls reserve(R0,92160M) c20 m(R0) a(R0,20M) malloc(S0,20M)
    empty
    calls free(S0,20M) wait(0) u(R0,20M) r1 unreserve(R0)

EX-46: no retry while a scope is open [device 200M]
    create 2
    begin 2 none
    alloc a 150M -> R0
    free a
    calls reserve(R0,240M) c20 c20 c20 c20 c20 c20 c20 c20 m(R0) m(R0+20M) m(R0+40M) m(R0+60M)
        m(R0+80M) m(R0+100M) m(R0+120M) m(R0+140M) a(R0,160M)
    alloc b 100M s2 -> oom
    calls reserve(R1,240M) c20 c20 c20! r9 r10
    stats retries=0 ooms=1 reserved=160M

EX-47: whole chunks from a pool that does not split
    create 2
    nosplit 2
    begin 2
    alloc a 4M -> R0
    alloc b 4M -> R0+20M
    alloc c 512 -> R1
    calls reserve(R0,92160M) c20 m(R0) a(R0,20M) c20 m(R0+20M) a(R0+20M,20M) reserve(R1,92160M) c2
        m(R1) a(R1,2M)
    blocks R0 40M[20M:A 20M:A]; R1 2M[2M:A]

EX-48: what is out of memory [device 50M]
    alloc a 30M -> R0
    calls reserve(R0,60M) c20 c20 m(R0) m(R0+20M) a(R0,40M)
    alloc b 60M -> oom
    calls reserve(R1,60M) c20! c20!
    blocks R0 40M[30M:A 10M:-]
    stats reserved=40M retries=1 ooms=1

EX-49: a chunk is 20 MiB [device 30M]
    alloc a 10M -> R0
    alloc b 12M -> oom
    stats reserved=20M
    alloc c 10M -> R0+10M
    calls reserve(R0,40M) c20 m(R0) a(R0,20M) c20! c20!
    alloc d 1M -> R1
    calls reserve(R1,34M) c2 m(R1) a(R1,2M)
    blocks R0 20M[10M:A 10M:A]; R1 2M[1M:A 1M:-]

EX-50: the retry waits for events [device 70M]
    alloc a 50M -> R0
    hold 2
    use a 2
    free a
    calls reserve(R0,80M) c20 c20 c20 m(R0) m(R0+20M) m(R0+40M) a(R0,60M) record(2)
    alloc b 55M -> R1
    calls query(2) reserve(R1,80M) c20! sync(2) wait(0) u(R0,20M) r1 u(R0+20M,20M) r2 u(R0+40M,20M)
        r3 unreserve(R0) c20 c20 c20 m(R1) m(R1+20M) m(R1+40M) a(R1,60M)
    stats retries=1 waits=1

EX-51: chunks inside a run of small blocks
    many a 16 768K -> R0
    calls reserve(R0,92160M) c2 m(R0) a(R0,2M) c2 m(R0+2M) a(R0+2M,2M) c2 m(R0+4M) a(R0+4M,2M) c2
        m(R0+6M) a(R0+6M,2M) c2 m(R0+8M) a(R0+8M,2M) c2 m(R0+10M) a(R0+10M,2M)
    free a2 a3 a4 a5 a6 a7 a8
    empty
    calls wait(0) u(R0+2M,2M) r2 u(R0+4M,2M) r3
    blocks R0 2M[768K:A 768K:A 512K:-]; R0+6M 6M[768K:- 768K:A 768K:A 768K:A 768K:A 768K:A 768K:A
        768K:A]
    stats df=1

EX-52: the statistics of one mapping and its end
    alloc a 25M -> R0
    free a
    empty
    stats reserved=0 reserved.peak=40M reserved.allocated=40M reserved.freed=40M da=1 df=1 waits=1
        segment=0 split=0
"""

CASES: tuple[Case, ...] = tuple(parse_cases(TEXT))
