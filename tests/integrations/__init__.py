"""Tests of the plugin, with what vLLM needs on CPUs in reach of their processes."""

import os
import sys
from pathlib import Path

ON_CPU = str(Path(__file__).with_name("on_cpu"))
sys.path.append(ON_CPU)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), ON_CPU)))
