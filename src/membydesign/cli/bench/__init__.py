"""`mbd bench`: speed and memory as ratios, everything that is compared taken in turn in one run.

Machines differ and are noisy; a ratio of two things that were measured in turn is what can be compared.

problem   the inputs that ours and the peers share       speed     speed, transitions, growth with T
works     our designs and Transformers' code, as tasks   rate      operations a second, beside matrix products
timing    rows, jobs and the interleaved clock           memory    peak memory, each in a process of its own
sections  what can be chosen with --only                 choices   the table behind the default backend and chunk size
page      tables for people, JSON for machines           accuracy  float32 against float64, on streams that are hard
                                                         text      tokens a second, beside the obvious way
"""
