"""Has handlers of its own, and ends by SIGTERM without one in the midst of a training."""

import os
import signal
import time

from small import model_and_optimizer, step

print([signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)], signal.set_wakeup_fd(-1))
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: print("handled", signal.Signals(number).name, flush=True))
model, optimizer = model_and_optimizer()
for index in range(8):
    print(repr(step(model, optimizer)), flush=True)
    if index == 3:
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
    if index == 6:
        time.sleep(0.3)  # so that the next step's end is a flush
signal.signal(signal.SIGTERM, signal.SIG_DFL)
try:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)
finally:
    print("never said", flush=True)
