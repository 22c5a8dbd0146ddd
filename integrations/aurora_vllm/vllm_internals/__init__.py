"""All that knows vLLM's internals: which seams must be there, and what is put into them. Tried with vLLM 0.32.

Only one inert hook is there before anything is asked for: around `WorkerWrapperBase.init_device`, which every worker calls
when its configuration is known and before communicators and model are built. The rest is put in when the settings ask; what
needs numba is imported then, because before that point vLLM's search for Triton kernels stumbles over llvmlite.
"""
