"""aurora inside vLLM: planned placement, ordered all-to-all and recorded traffic. Nothing happens until it is asked for."""


def register() -> None:
    """vLLM's entry point `vllm.general_plugins`, called in every process before there is a configuration."""
    from aurora_vllm.vllm_internals.hook import hook

    hook()
