"""`python -m tools.mutants`: do the tests notice small faults, in a fixed sample of functions?

Note [Mutants]: a mutant is one function with one small change. `sample` chooses about 300 functions
by a hash of their names, and in each of them one change. `weaving` compiles all changes into one
copy of the package, in which an environment variable switches one of them on. `reach` runs the
short tests once without a change, and records which tests execute which changed statement.
`killing` then runs, for each mutant, the tests that reach it: the mutant is killed if one of them
fails, and survives otherwise. `tests/records/mutants.tsv` keeps the results.

A refactoring that moves or removes tests compares its results with the record from before
(`comparison`): each function whose mutant was killed before has a mutant that is killed after.
"""
