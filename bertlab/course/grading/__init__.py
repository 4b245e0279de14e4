"""Grading: hidden tests in a trusted process, the student's code in a sandboxed one.

From the outside in: `commands` is the command line, `submissions` finds what was handed in,
`gradebook` keeps the results, `batch` runs many, `jobs` is what a worker does of them, `grader`
runs the hidden tests on one submission, `hidden` is what such a test is given, `sandbox` locks the
student's process up and talks to it, `syscalls` says what it may not ask of the kernel, `worker`
and `calls` are what runs inside, `slices` cuts out of the course what may enter, and `wire` is all
that passes between the two. From the results, `visible` makes what may be seen, `report` and
`plots` the pages, and `export` the files for other systems.
"""
