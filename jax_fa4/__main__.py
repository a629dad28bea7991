"""`python -m jax_fa4`: what is here, what would run, and whether it is right (see `jax_fa4.doctor`)."""

import sys

from jax_fa4 import doctor

sys.exit(doctor.main())
