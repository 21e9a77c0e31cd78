"""The trusted process outside the sandbox that supervises it; needs the standard library alone.

It is started by path, without the rest of trew, so it costs some 20 ms and 15 MB instead of a whole import.
"""
