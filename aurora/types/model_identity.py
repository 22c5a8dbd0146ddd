"""Identity of a model: its sizes and a digest of its router weights, by which files of one model are told from another's."""

from dataclasses import dataclass

from aurora.errors import BadInput

PRECISIONS = (0.125, 0.25, 0.5, 1, 2, 4, 8)  # how many times wider a number is than the same number at another precision


def same_model(found: str, planned: str) -> bool:
    """Returns whether two fingerprints can belong to the same model.

    A fingerprint has one hash of the router weights for each precision that they may be loaded in, separated by dots. Two
    fingerprints match if they have a hash in common: weights that were rounded once do not change when rounded again. A
    synthetic profile has no fingerprint, and fits any model of its shape.
    """
    return not found or not planned or not set(found.split(".")).isdisjoint(planned.split("."))


@dataclass(frozen=True)
class ModelIdentity:
    """The sizes of a model and, where it is known, a digest of its router weights.

    Args:
        model: the model's name, for messages; it is not compared, because folders are renamed.
        fingerprint: hashes of its router weights, see `same_model`; empty if the weights are unknown, as for a synthetic
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

        Fingerprints must have a hash in common. If a fingerprint is missing, sizes are compared: layers, experts, top-k, and
        the bytes of experts and rows, which may differ by a precision.

        Args:
            expected: the model that it should be.
            subject: name of this model's file or option in the message.

        Raises:
            BadInput: if it is another model.
        """
        shape = expected.check_routing(self.layers, self.experts, self.fingerprint, subject)
        if self.fingerprint and expected.fingerprint:
            return
        wider = self.row_bytes / expected.row_bytes if expected.row_bytes else float(self.row_bytes == 0)
        alike = self.expert_bytes * expected.row_bytes == expected.expert_bytes * self.row_bytes and wider in PRECISIONS
        if self.top_k != expected.top_k or not alike:
            raise BadInput(
                f"{shape}, but expected top-{expected.top_k}, rows of {expected.row_bytes} and experts of "
                f"{expected.expert_bytes} bytes, found top-{self.top_k}, {self.row_bytes} and {self.expert_bytes}; sizes are "
                "compared because a fingerprint is missing"
            )

    def check_routing(self, layers: int, experts: int, fingerprint: str, subject: str) -> str:
        """Checks that recorded routing can be of this model, by its number of layers and experts, and its fingerprint if known.

        Args:
            layers, experts, fingerprint: of the routing's model; an empty fingerprint is not compared.
            subject: name of the routing's file or option in the message.

        Returns:
            A sentence with the expected and the found sizes, for error messages of further checks by the caller.

        Raises:
            BadInput: if it is another model.
        """
        shape = (
            f"{subject}: expected {self.model!r} with {self.layers} MoE layers of {self.experts} experts, "
            f"found {layers} of {experts}"
        )
        if (layers, experts) != (self.layers, self.experts):
            raise BadInput(shape)
        if not same_model(fingerprint, self.fingerprint):
            raise BadInput(f"{shape} and other router weights")
        return shape

    def proves(self, other: "ModelIdentity") -> bool:
        """Returns whether both models have a fingerprint, so that a passed `check_same` proves that they are the same."""
        return bool(self.fingerprint and other.fingerprint)
