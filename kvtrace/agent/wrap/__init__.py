"""What puts a function in another one's place, and finds it on a stack.

Comes in: a function, class or module that is to be seen.
Goes out: a wrapper with its signature, a proxy, a callback after an import.
May not: know the agent's state, or vLLM.
"""
