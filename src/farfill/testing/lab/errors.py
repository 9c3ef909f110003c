"""What the lab raises."""

from __future__ import annotations

from farfill.core.errors import FarfillError


class LabError(FarfillError):
    """The lab cannot be set up or used that way; the message says what is missing."""

    reason = "lab"
