"""aurora as a vLLM plugin: planned expert placement, ordered all-to-all, traffic records. It is inert until configured."""

import os


def register() -> None:
    """Registers the plugin with vLLM, which calls this entry point in every process before any configuration exists."""
    from aurora_vllm.vllm_internals.hooks import install_dp_hook, install_settings_check, install_worker_hook
    from aurora_vllm.vllm_internals.requests import watch_prompts

    install_settings_check()
    install_worker_hook()
    install_dp_hook()
    watch_prompts()
    if "AURORA_FAULT_STORE" in os.environ:
        from aurora_vllm.vllm_internals.fault_tolerance import install

        install()
