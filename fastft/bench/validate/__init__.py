"""`fastft validate KERNEL`: the gate for whoever adds or changes a kernel.

    checkout.py   which kernels there are, which files make one up
    context.py    what every step is given, how commands are run, the exit codes
    lint.py       1. ruff, its own fixes, ruff again
    gate.py       2. the tests, as attempts at changed code
    state.py         what is remembered between runs: verdicts, failed attempts, the last green source
    measure.py    3. `fastft bench` on this kernel, and what its figures say; 4. its plots
    profile.py    5. Nsight Compute, on request
    target.py        the process it looks at
    report.py     6. the table and report.md
    command.py    the steps in order

Nothing is written outside .fastft/validate/ in the checkout, except what ruff mends in the kernel's file and its
test's.
"""
