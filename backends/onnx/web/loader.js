// A decoder with states, such as those of a Mamba, for which transformers.js has no type: AutoModel loads it, and each
// call gets the states that the last one returned. Use it in Node too:
//   import * as library from "@huggingface/transformers"; import {Decoder} from "./site/loader.js";
//   const decoder = await Decoder.from_pretrained(library, "site");
//   const {sequences} = await decoder.generate({...tokenizer("Once upon a time"), max_new_tokens: 20});
export class Decoder {
  constructor(library, model) {
    Object.assign(this, {library, model, states: model.config.weft.states, stops: [model.config.eos_token_id].flat()});
  }

  static async from_pretrained(library, folder, options = {}) {
    return new Decoder(library, await library.AutoModel.from_pretrained(folder, options));
  }

  // The states before the first token: caches of length 0, and others filled with their initial value.
  begin() {
    const types = {float32: Float32Array, float16: Uint16Array, int64: BigInt64Array, int32: Int32Array};
    const inputs = Object.fromEntries(this.model.sessions.model.inputMetadata.map(input => [input.name, input]));
    return Object.fromEntries(this.states.map(({input, initial = 0}) => {
      const {type, shape} = inputs[input], dims = shape.map(n => typeof n === "number" ? n : +(n === "batch_size"));
      const data = new types[type](dims.reduce((product, n) => product * n, 1));
      return [input, new this.library.Tensor(type, initial ? data.fill(initial) : data, dims)];
    }));
  }

  // Takes one text. Returns {sequences, past_key_values} as `generate` of transformers.js does.
  async generate({input_ids, past_key_values, max_new_tokens = 64, do_sample, temperature = 1, streamer, stopping_criteria}) {
    const ids = input_ids.tolist()[0].map(BigInt), tensor = row => new this.library.Tensor("int64", row, [1, row.length]);
    let {states, length} = past_key_values ?? {states: this.begin(), length: 0};
    streamer?.put([ids]);
    for (let count = 0; count < max_new_tokens && !stopping_criteria?.interrupted; count++) {
      const call = ids.slice(length), positions = call.map((_, i) => BigInt(length + i));
      const output = await this.model({
        ...states, input_ids: tensor(call), position_ids: tensor(positions), attention_mask: tensor(ids.map(() => 1n)),
      });
      states = Object.fromEntries(this.states.map(state => [state.input, output[state.output]]));
      length = ids.length;
      const logits = output.logits.to("float32").data.slice(-output.logits.dims.at(-1));
      const next = do_sample ? this.sample(logits, temperature) : logits.indexOf(Math.max(...logits));
      ids.push(BigInt(next));
      streamer?.put([[BigInt(next)]]);
      if (this.stops.includes(next)) break;
    }
    streamer?.end();
    return {sequences: tensor(ids), past_key_values: {states, length}};
  }

  sample(logits, temperature) {
    const scores = this.library.softmax([...logits].map(x => x / temperature));
    let rest = Math.random();
    return Math.max(scores.findIndex(score => (rest -= score) < 0), 0);
  }
}
