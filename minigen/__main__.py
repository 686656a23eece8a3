"""``python -m minigen`` and the ``minigen`` command start here."""

import signal

# While Python still imports, Ctrl-C ends the process without a traceback.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from minigen.cli import main

if __name__ == "__main__":
    main()
