"""Offer a policy on a websocket, and ask it for an action chunk as a robot's computer would.

You learn: what the server tells its clients, what an observation holds on the wire, and that the
client needs neither torch nor the checkpoint. Here both are in one process; ``embodyrl serve`` is
the server alone. It speaks the protocol of openpi's clients.

Costs: 10 s. Needs: demonstrate_and_imitate.py; pip install 'embodyrl[robot]'.
Prints: the server's metadata, an action chunk, the time it took, and a refusal.
"""

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np

from embodyrl.build import make_env
from embodyrl.real_robot.policy_link.checkpoint_policy import CheckpointPolicy
from embodyrl.real_robot.policy_link.client import PolicyClient, ServerError
from embodyrl.real_robot.policy_link.server import PolicyServer

RUN = Path("runs/examples/imitation")


def main() -> None:
    # The server. Without a token it listens on this machine alone; port 0 takes a free one.
    policy = CheckpointPolicy(str(RUN), device="cpu")
    server = PolicyServer(policy.infer, policy.metadata, port=0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    # The client.
    client = PolicyClient(f"ws://127.0.0.1:{server.port}")
    metadata = client.connect()
    for key, value in metadata.items():
        print(f"{key:18} {value}")
    env = make_env(
        replace(policy.config.env, num_envs=1, device="cpu")
    )  # a robot would observe instead
    obs = env.reset(init=[0])
    proprio = obs.proprio[0].numpy()
    answer = client.infer({"proprio": proprio, "prompt": obs.instruction[0]})
    print(f"\nThe chunk (H, A) for {obs.instruction[0]!r}:\n{np.round(answer['actions'], 2)}")
    print(f"inference took {answer['server_timing']['infer_ms']:.1f} ms")

    # What does not fit the policy is refused in words, and the connection goes on.
    try:
        client.infer({"proprio": proprio[:3], "prompt": ""})
    except ServerError as error:
        print(f"\n{error}")
    client.close()
    server.close()
    thread.join()


if __name__ == "__main__":
    main()
