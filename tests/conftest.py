"""What every test shares: one thread for torch, because the machine is shared with other tests."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
