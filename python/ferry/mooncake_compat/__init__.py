"""The part of Mooncake's API that SGLang's backend `mooncake` asks for, over Ferry's engine.

It is importable as `mooncake` where the real package is absent. Both sides must have it: it does
not speak to Mooncake itself.
"""
