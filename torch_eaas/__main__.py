"""``python -m torch_eaas`` is ``torch-eaas``."""

import sys

from torch_eaas.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
