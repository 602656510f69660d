// Continue a prompt greedily with a folder of `weft compile`, without Python: ./run FOLDER PROMPT NEW_TOKENS
#include "ort_genai_c.h"

#include <cstdio>
#include <cstdlib>

static void check(OgaResult* error) {
  if (error) std::exit((std::fprintf(stderr, "%s\n", OgaResultGetError(error)), 1));
}

int main(int argc, char** argv) {
  if (argc != 4) return std::fprintf(stderr, "usage: %s FOLDER PROMPT NEW_TOKENS\n", argv[0]), 2;
  OgaModel* model;
  OgaTokenizer* tokenizer;
  OgaTokenizerStream* text;
  OgaSequences* prompt;
  OgaGeneratorParams* params;
  OgaGenerator* generator;
  check(OgaCreateModel(argv[1], &model));
  check(OgaCreateTokenizer(model, &tokenizer));
  check(OgaCreateTokenizerStream(tokenizer, &text));
  check(OgaCreateSequences(&prompt));
  check(OgaTokenizerEncode(tokenizer, argv[2], prompt));
  const double length = OgaSequencesGetSequenceCount(prompt, 0) + std::atof(argv[3]);
  check(OgaCreateGeneratorParams(model, &params));
  check(OgaGeneratorParamsSetSearchNumber(params, "max_length", length));
  check(OgaCreateGenerator(model, params, &generator));
  check(OgaGenerator_AppendTokenSequences(generator, prompt));
  while (!OgaGenerator_IsDone(generator)) {
    const int32_t* tokens;
    size_t count;
    const char* piece;
    check(OgaGenerator_GenerateNextToken(generator));
    check(OgaGenerator_GetNextTokens(generator, &tokens, &count));
    check(OgaTokenizerStreamDecode(text, tokens[0], &piece));
    std::printf("%s", piece);
    std::fflush(stdout);
  }
}
