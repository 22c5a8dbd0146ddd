"""aurora as a vLLM plugin: planned expert placement, ordered all-to-all, traffic records. It is inert until configured."""


def register() -> None:
    """Registers the plugin with vLLM, which calls this entry point in every process before any configuration exists.

    It replaces nothing of vLLM's where no settings are in sight. A script that makes an engine with settings after one without
    any calls this function itself before.
    """
    from aurora_vllm.vllm_internals.hooks import install_settings_check

    install_settings_check()
