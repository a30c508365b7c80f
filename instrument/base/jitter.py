"""Random pauses, so that the ranks of a large job do not all act at the same moment."""

from random import SystemRandom

# not Python's own generator, which the program may have seeded, and which forked ranks share
uniform = SystemRandom().uniform
