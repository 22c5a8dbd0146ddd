"""Compute curves without traffic: how long each kind of GPU takes for the phases of one model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import overload

from aurora.errors import BadInput
from aurora.types.arrays import check_name
from aurora.types.model_identity import same_model
from aurora.types.profile import PHASES, CurvesByKind, Profile
from aurora.types.value import Value


@dataclass(frozen=True, eq=False, repr=False)
class ComputeCurves(Value):
    """Compute curves of GPU kinds, measured for one model, to be added to its profiles.

    Attributes:
        model: the model's name.
        fingerprint: a hash of its router weights; empty if unknown.
        top_k: experts per token.
        row_bytes: bytes of one token's hidden state, which tells width and precision.
        expert_bytes: bytes of one expert's weights.
        kinds: by GPU kind, a Curve for each of PHASES, and for OVERHEAD if it was measured, as in a Profile.
        provenance: how each kind was measured.
    """

    model: str
    fingerprint: str
    top_k: int
    row_bytes: int
    expert_bytes: int
    kinds: CurvesByKind
    provenance: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        what = f"curves of {self.model!r}"
        for name in (self.model, self.fingerprint, *self.kinds):
            check_name(f"{what}: model, fingerprint and kinds", name)
        for name in ("top_k", "row_bytes", "expert_bytes"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise BadInput(f"{what}: {name} must be a whole number above zero, found {value}")
        if not self.kinds:
            raise BadInput(f"{what}: expected at least one GPU kind, found none")
        for kind, phases in self.kinds.items():
            if missing := [phase for phase in PHASES if phase not in phases]:
                raise BadInput(f"{what}: the curves of kind {kind!r} lack {', '.join(missing)}")

    @overload
    def into(self, other: Profile) -> Profile: ...
    @overload
    def into(self, other: "ComputeCurves") -> "ComputeCurves": ...
    def into(self, other: "Profile | ComputeCurves") -> "Profile | ComputeCurves":
        """Returns `other` with these kinds added; a kind that it already has is replaced. Its first kind stays the reference.

        Raises:
            BadInput: if `other` is of another model, or of the same at another precision.
        """
        theirs = other.dispatch_bytes if isinstance(other, Profile) else other.row_bytes
        if not same_model(self.fingerprint, other.fingerprint):
            raise BadInput(f"curves of {self.model!r}: measured on other router weights than those of {other.model!r}")
        found = (self.top_k, self.row_bytes, self.expert_bytes)
        if found != (expected := (other.top_k, theirs, other.expert_bytes)):
            raise BadInput(
                f"curves of {self.model!r}: expected top-{expected[0]}, rows of {expected[1]} and experts of {expected[2]} "
                f"bytes, as {other.model!r} has, found top-{found[0]}, {found[1]} and {found[2]}: another model or another "
                "precision"
            )
        provenance = {**other.provenance, **self.provenance}
        if isinstance(other, Profile):
            return replace(other, curves={**other.curves, **self.kinds}, provenance=provenance)
        return replace(other, kinds={**other.kinds, **self.kinds}, provenance=provenance)
