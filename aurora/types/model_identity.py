"""What tells one model from another."""

from dataclasses import dataclass

from aurora.errors import BadInput

PRECISIONS = (0.125, 0.25, 0.5, 1, 2, 4, 8)  # how many times wider a number is than the same number at another precision
EARLIER = "; profiles of earlier versions know a model at one precision only: if this is the same at another, make them anew"


def same_model(found: str, planned: str) -> bool:
    """Returns whether two fingerprints can belong to one model.

    A fingerprint has a hash of the router weights at each precision that they may be loaded in, with dots between; those of
    earlier versions have one. One hash in common is enough, because weights that were rounded once are not changed by rounding
    them again. A synthetic profile has no fingerprint, and fits any model of its shape.
    """
    return not found or not planned or not set(found.split(".")).isdisjoint(planned.split("."))


def other_weights(found: str, planned: str) -> str:
    """Returns the end of a sentence that says that two fingerprints belong to different models; empty if they may not."""
    if same_model(found, planned):
        return ""
    return " and other router weights" + ("" if "." in found and "." in planned else EARLIER)


@dataclass(frozen=True)
class ModelIdentity:
    """The sizes of a model and, where it is known, a digest of its router weights.

    Args:
        model: the model's name, which proves nothing, because folders are renamed.
        fingerprint: hashes of its router weights, see `same_model`; empty if there are none to read, as for a synthetic
            profile.
        layers: number of MoE layers.
        experts: experts of a layer.
        top_k: experts per token.
        row_bytes: payload bytes of one (token, expert) pair.
        expert_bytes: bytes of one expert's weights in one layer.
    """

    model: str
    fingerprint: str
    layers: int
    experts: int
    top_k: int
    row_bytes: int
    expert_bytes: int

    def check_same(self, expected: "ModelIdentity", subject: str) -> None:
        """Checks that this model can be the expected one.

        Fingerprints with a hash in common are proof. If one is missing, sizes are compared: layers, experts, top-k, and the
        bytes of experts and rows, which may be those of another precision.

        Args:
            expected: the model that it should be.
            subject: what is checked, for the message.

        Raises:
            BadInput: if it is another model.
        """
        found, wanted = ((each.layers, each.experts) for each in (self, expected))
        shape = (
            f"{subject}: expected {expected.model!r} with {expected.layers} MoE layers of {expected.experts} experts, "
            f"found {self.layers} of {self.experts}"
        )
        if found != wanted:
            raise BadInput(shape)
        if self.fingerprint and expected.fingerprint:
            if other := other_weights(self.fingerprint, expected.fingerprint):
                raise BadInput(f"{shape}{other}")
            return
        wider = self.row_bytes / expected.row_bytes if expected.row_bytes else float(self.row_bytes == 0)
        alike = self.expert_bytes * expected.row_bytes == expected.expert_bytes * self.row_bytes and wider in PRECISIONS
        if self.top_k != expected.top_k or not alike:
            raise BadInput(
                f"{shape}, but expected top-{expected.top_k}, rows of {expected.row_bytes} and experts of "
                f"{expected.expert_bytes} bytes, found top-{self.top_k}, {self.row_bytes} and {self.expert_bytes}; sizes are "
                "compared because a fingerprint is missing"
            )

    def proves(self, other: "ModelIdentity") -> bool:
        """Returns whether both have a fingerprint, so that `check_same` compared more than sizes."""
        return bool(self.fingerprint and other.fingerprint)
