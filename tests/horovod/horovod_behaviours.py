"""The behaviours of horovod.torch that users rely on, a function for each.

Each function runs on the ranks of an initialised world of 2 or 3 and leaves it usable. The
project's list has the same numbers.
"""

import behaviours_of_collectives
import behaviours_of_training

_NAMED = vars(behaviours_of_collectives) | vars(behaviours_of_training)
BEHAVIOURS = [_NAMED[name] for name in sorted(_NAMED) if name.startswith("behaviour_")]
