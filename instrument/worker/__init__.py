"""From a raw trace to a finished capture, without torch: the queue, the process beside, upload, retention."""
