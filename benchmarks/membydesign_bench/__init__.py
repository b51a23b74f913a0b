"""Measure speed and memory as ratios of things that one run measures in turn (`mbd bench`, `make bench`).

Machines differ and are noisy; ratios within one run can be compared, times cannot.

problem   the inputs that ours and the peers share       speed     speed, transitions, growth with T
works     our designs and Transformers' code, as tasks   rate      operations per second, compared with matrix products
timing    rows, jobs and the interleaved clock           memory    peak memory, each in a fresh process
sections  what can be chosen with --only                 choices   the table behind the default backend and chunk size
page      tables and JSON                                accuracy  float32 against float64, on hard streams
run       runs sections and shows the results            text      tokens per second, compared with plain Python
child     starts modules in fresh processes              models    training and decoding of whole models
roofline  estimates for GPUs (docs/internals/roofline.md)          steps     training steps of recall and MQAR
                                                         generation  answers with and without the cache
"""
