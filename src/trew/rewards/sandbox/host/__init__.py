"""What runs beside the sandbox, outside it and trusted: a small process of the standard library alone.

It is started by path, without the rest of trew, so that it costs some 20 ms and 15 MB instead of a whole import.
"""
