"""PPO of stable-baselines3: what the policy does in several environments goes through the host."""

import gymnasium
import numpy
import torch
from planted import FOREACH, plant
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv


class Walk(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (64,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(6)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return numpy.zeros(64, numpy.float32), {}

    def step(self, action):
        self.steps += 1
        return numpy.full(64, self.steps / 20, numpy.float32), 1.0, False, self.steps == 20, {}


def train(setup):
    sizes = {"n_steps": setup.case.batch_size // 4, "batch_size": setup.case.batch_size, "n_epochs": 1}
    policy = {"net_arch": [256, 256], "optimizer_kwargs": FOREACH}
    model = PPO("MlpPolicy", DummyVecEnv([Walk] * 4), device=setup.device, policy_kwargs=policy, **sizes)
    plant(model.policy.mlp_extractor.policy_net[0], model.policy.optimizer)
    setup.watch(model.policy)
    setup.evaluation(lambda: model.policy.predict(numpy.zeros((512, 64), numpy.float32)))
    _, callback = model._setup_learn(10**9)
    while True:
        model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
        model.train()
        yield torch.tensor(model.logger.name_to_value["train/loss"])
