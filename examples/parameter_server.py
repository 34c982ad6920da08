# One command:  python examples/parameter_server.py
#
# A server holds the weights; three clients train on their own shards of the digits, one of which is killed (SIGKILL)
# half way. Its session ends; the other two train on, and the server prints how right the model is.
"""A parameter server, of which a client is killed."""

import argparse
import multiprocessing as mp
import os
import signal
import threading

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ft_core import ProcessGroupGloo
from ft_core.process_group.parameter_server import ParameterServer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--clients", type=int, default=3)
parser.add_argument("--steps", type=int, default=200, help="of each client")
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Weights(ParameterServer):
    """A client asks for the weights, and answers with a gradient, which is applied at once."""

    def __init__(self):
        self.model, self.lock = build(), threading.Lock()
        self.applied = 0
        super().__init__(host="127.0.0.1")

    @classmethod
    def new_process_group(cls):
        return ProcessGroupGloo(timeout=60.0)

    def forward(self, session_id, pg):
        gradient = torch.zeros_like(parameters_to_vector(self.model.parameters()))
        for _ in range(args.steps):
            with self.lock:
                weights = parameters_to_vector(self.model.parameters()).detach()
            pg.broadcast_one(weights, root=0).wait()
            pg.broadcast_one(gradient, root=1).wait()
            with self.lock, torch.no_grad():
                weights = parameters_to_vector(self.model.parameters()) - args.lr * gradient
                vector_to_parameters(weights, self.model.parameters())
                self.applied += 1


def client(number, address):
    torch.set_num_threads(1)
    model, pg = build(), Weights.new_session(address)
    weights = parameters_to_vector(model.parameters()).detach()
    chance = torch.Generator().manual_seed(number)
    mine = torch.arange(number, 1500, args.clients)
    for step in range(args.steps):
        if number == 0 and step == args.steps // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        pg.broadcast_one(weights, root=0).wait()
        vector_to_parameters(weights, model.parameters())
        batch = mine[torch.randint(len(mine), (32,), generator=chance)]
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        pg.broadcast_one(parameters_to_vector(gradients), root=1).wait()
    pg.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    with Weights() as server:
        start = mp.get_context("spawn").Process
        clients = [start(target=client, args=(n, server.address())) for n in range(args.clients)]
        for each in clients:
            each.start()
        clients[0].join()
        assert clients[0].exitcode == -signal.SIGKILL
        print(f"client 0 was killed; {server.applied} gradients applied", flush=True)
        for each in clients:
            each.join()
        with torch.no_grad():
            right = (server.model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
        ended = sum(each.exitcode == 0 for each in clients)
        print(
            f"{ended} clients have finished; {server.applied} gradients applied, {right:.1%} right"
        )
