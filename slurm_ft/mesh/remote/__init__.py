"""The processes of a mesh and the calls to them.

    client process    user's thread ── mesh.call(...) ──> the mesh's own thread: one asyncio loop
                                                             │ ZeroMQ under CURVE, one message a host
    host process      one per host, started by srun (or locally): host.py
                         │ forks workers from a zygote     │ Unix socket, the message's bytes as they came
    worker processes  worker.py: unpickles, runs, answers

Only bytes pass through the host process; nothing is unpickled but by a worker and by the thread that asks
for a result, and both got the bytes over an authenticated channel.
"""
