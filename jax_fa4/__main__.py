"""`python -m jax_fa4`: what is here, what would run, and whether it is right (see `jax_fa4.doctor`)."""

import argparse
import os
import sys

from jax_fa4 import doctor

argparse.ArgumentParser(
    prog="python -m jax_fa4",
    description="Says what is here, what would run a few models' calls, and whether it is right; the exit status is 1 "
    "if anything is missing or wrong.",
).parse_args()
try:
    status = doctor.main()
    sys.stdout.flush()
except BrokenPipeError:  # whoever read this has read enough, and will not see how it ends
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    status = 1
sys.exit(status)
