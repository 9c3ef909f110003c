"""What all sections of the cluster file share, and the forms of their values."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Address = Annotated[str, Field(pattern=r"^(\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):\d{1,5}$")]
SecretRef = Annotated[str, Field(pattern=r"^(file|env):.+$")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]


class Section(BaseModel):
    """Unknown keys are refused; values are never coerced from another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
