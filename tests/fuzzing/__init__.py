"""A differential fuzzer: random filters, compared with a reference written from the mathematics.

`specs` names the designs, `cases` draws everything else from a seed and a number, `layouts` gives tensors unusual
strides, `running` filters a case with the library, `reference` computes the same from the paper's equations in float64,
`judging` compares the two within the rounding errors that the reference measures, and `campaign` runs many cases in
subprocesses.
`python -m fuzzing --help` (with tests/ on the path) says how to run it; docs/internals/reliability.md
what it has shown.
"""
