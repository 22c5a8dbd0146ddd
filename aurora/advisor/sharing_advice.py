"""What to do with the GPUs that serve one model: share them with others, cut its steps into micro-batches, or nothing."""

from aurora.advisor.colocation_ways import compare_ways
from aurora.advisor.ways import BY_EXCHANGE, BY_LAYER, IN_SEQUENCE, MICRO_BATCHES, THREE_MODELS, WaysCompared
from aurora.types import Cluster, Profile

ADVISED = (IN_SEQUENCE, MICRO_BATCHES, BY_EXCHANGE, BY_LAYER, THREE_MODELS)  # what the runtime can do
ADVISED_STEPS = 2  # simulated of each model
WORTH = 1.05  # a gain that is worth doing something for
MORE = 1.1  # by what three models must be ahead of two


def compare_sharing(cluster: Cluster, profile: Profile) -> WaysCompared:
    """Returns what one model's GPUs bring in each way of ADVISED, at the tokens that a rank has in the profile's windows.

    Args:
        cluster: the GPUs.
        profile: the model's traffic; other models are taken to be like it.

    Raises:
        BadInput: if the profile does not fit the cluster.
        InfeasiblePlan: if the GPUs' memory does not hold the model.
    """
    tokens = profile.tokens_TLSE.sum() / profile.top_k / profile.layers / profile.windows / profile.sources
    return compare_ways(cluster, [profile], max(1, round(float(tokens))), steps=ADVISED_STEPS, ways=ADVISED)


def sharing_advice(compared: WaysCompared) -> str:
    """Returns a sentence that says what to do, with the figures that speak for it.

    Args:
        compared: of one model, and of others like it.
    """
    gains = compared.gains
    at = f"with {compared.batch} tokens of a rank in a step (simulated)"
    two = max((way for way in (BY_EXCHANGE, BY_LAYER) if way in gains), key=gains.__getitem__, default=None)
    halves, three = gains.get(MICRO_BATCHES, 1.0), gains.get(THREE_MODELS, 0.0)
    shared = 0.0 if two is None else gains[two]
    alone = f"two micro-batches of this model alone {halves:.2f}x"
    if max(halves, shared, three) < WORTH:
        best = max(halves, shared, three)
        if two is None:
            return f"Leave the GPUs to this model: {alone} {at}, and memory does not hold a second model like it."
        return f"Leave the GPUs to this model: neither a second model nor micro-batches bring more than {best:.2f}x {at}."
    if two is None or halves * WORTH > max(shared, three):
        other = "memory does not hold a second model like it" if two is None else f"a second model like it {shared:.2f}x"
        return f"Cut each step into two micro-batches that overlap: {halves:.2f}x the throughput {at}; {other}."
    share, over = "Share these GPUs", f"the throughput of one after the other {at}"
    if three > shared * MORE:
        return f"{share} between three models: {three:.2f}x {over}; two models {two} {shared:.2f}x, {alone}."
    further = f"three models {three:.2f}x, " if three else ""
    return f"{share} with a second model, {two}: {shared:.2f}x {over}; {further}{alone}."
