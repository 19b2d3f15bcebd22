"""Property tests without a deadline: the machine may be shared."""

from __future__ import annotations

import hypothesis

hypothesis.settings.register_profile("shared-machine", deadline=None, max_examples=40)
hypothesis.settings.load_profile("shared-machine")
