"""Grading: hidden tests in a trusted process, the student's code in a sandboxed one.

From the outside in: `submissions` finds what was handed in, `gradebook` keeps the results,
`batch` runs many, `grader` runs the hidden tests on one, `session` talks to the student's process,
`sandbox` locks it up, `worker` is what runs inside, and `wire` is all that passes between them.
"""
