"""torchrun without its pages of text when a worker fails: the exit code is the first failed worker's own.

Started by `torchtitan.tools.launch` with torchrun's arguments.
"""

import logging
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def main(argv: list[str]) -> int:
    """Run the workers; returns 0, or the exit code of the one that failed first (128 + N for signal N)."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run(parse_args(argv))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        if code < 0:
            print(f"[titan] rank {rank} was killed by signal {-code}", file=sys.stderr, flush=True)
        return code if code >= 0 else 128 - code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
