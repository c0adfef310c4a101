"""Makes deepseek_models importable, here and on the ranks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
