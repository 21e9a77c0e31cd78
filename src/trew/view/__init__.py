"""`trew view`: a server on this machine, and its web page, over run folders. Reads them and never writes."""
